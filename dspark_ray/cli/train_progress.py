"""What `dspark-ray train` shows in a terminal: progress, the loss, τ and acceptance by position."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dspark_ray.cli.common import err
from dspark_ray.training.observer import Observer

_BARS = "▁▂▃▄▅▆▇█"


class TrainingDisplay(Observer):
    """Keeps the latest of every figure on the screen."""

    def __init__(self, live: Live, total_steps: int) -> None:
        self._live = live
        self._bar = Progress(
            TextColumn("step"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=err
        )
        self._cache = Progress(
            TextColumn("caching the target's states"), BarColumn(), TimeRemainingColumn(), console=err
        )
        self._caching = self._cache.add_task("cache", total=1.0)
        self._task = self._bar.add_task("step", total=total_steps)
        self._latest: dict[str, Any] = {}

    def caching(self, share: float) -> None:
        self._cache.update(self._caching, completed=share)
        self._live.update(Group(self._cache, self._bar, self._table()) if share < 1.0 else self._steps())

    def _steps(self) -> Group:
        return Group(self._bar, self._table())

    def figures(self, step: int, values: Mapping[str, Any]) -> None:
        self._latest.update(values)
        self._bar.update(self._task, completed=step)
        self._live.update(self._steps())

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        latest = self._latest
        for name in (
            "loss",
            "cross_entropy",
            "total_variation",
            "blocks_per_s",
            "tau_sampling",
            "tau_greedy",
        ):
            if name in latest:
                table.add_row(name, f"{latest[name]:g}")
        for name in ("acceptance_sampling", "acceptance_greedy"):
            if latest.get(name):
                numbers = " ".join(f"{value:.2f}" for value in latest[name])
                table.add_row(name, f"{_sparkline(latest[name])}  {numbers}")
        return table


@contextmanager
def training_display(total_steps: int) -> Iterator[TrainingDisplay]:
    """The display while a run is on; log lines go above it."""
    with Live(console=err, refresh_per_second=4) as live:
        yield TrainingDisplay(live, total_steps)


def _sparkline(values: list[float]) -> str:
    return "".join(_BARS[min(int(value * len(_BARS)), len(_BARS) - 1)] for value in values)
