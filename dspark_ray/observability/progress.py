"""What work that takes long shows of itself: a bar on a terminal, a line now and then elsewhere.

with progress("simulating 3600 s") as tell:
    tell(0.4, "1,440 s")      # the finished share, and what the bar or the line says beside it
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from dspark_ray.core.clock import Clock, SystemClock

OnProgress = Callable[[float, str], None]
"""(the finished share in [0, 1], a note): cheap enough to be called in a loop."""

LINE_EVERY_MS = 10_000.0


class NowAndThen:
    """Says yes at most once in a while, and not at once: short work needs no report."""

    def __init__(self, every_ms: float = LINE_EVERY_MS, clock: Clock | None = None) -> None:
        self._every_ms, self._clock = every_ms, clock or SystemClock()
        self._began_ms = self._last_ms = self._clock.now_ms()

    @property
    def elapsed_s(self) -> float:
        return (self._clock.now_ms() - self._began_ms) / 1e3

    def due(self) -> bool:
        """Whether it is time for the next report, which then counts as made."""
        now_ms = self._clock.now_ms()
        if now_ms - self._last_ms < self._every_ms:
            return False
        self._last_ms = now_ms
        return True


@contextmanager
def progress(
    title: str, console: Console | None = None, *, every_ms: float = LINE_EVERY_MS, clock: Clock | None = None
) -> Iterator[OnProgress]:
    """Shows how far the work inside has come, on `console` (default: stderr); nothing once it has ended."""
    console = console or Console(stderr=True, highlight=False)
    if console.is_terminal:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        note = TextColumn("{task.fields[note]}", markup=False)
        with Progress(*columns, note, console=console, transient=True) as bar:
            task = bar.add_task(title, total=1.0, note="")
            yield lambda share, note: bar.update(task, completed=share, note=note)
        return
    pause = NowAndThen(every_ms, clock)

    def say(share: float, note: str) -> None:
        if pause.due():
            words = f"{title}: {share:.0%} after {pause.elapsed_s:.0f} s" + (f", {note}" if note else "")
            console.print(words, markup=False, soft_wrap=True)

    yield say
