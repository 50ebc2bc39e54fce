"""Long work on a terminal has a bar, and in a log a line now and then."""

import io

import pytest
from rich.console import Console

from dspark_ray.core.clock import ManualClock
from dspark_ray.observability.progress import NowAndThen, progress


def test_a_log_gets_a_line_now_and_then_and_none_for_short_work() -> None:
    clock, log = ManualClock(), io.StringIO()
    with progress("simulating", Console(file=log, width=40), every_ms=1000.0, clock=clock) as tell:
        tell(0.0, "")
        clock.advance(999.0)
        tell(0.2, "soon")
        clock.advance(1.0)
        tell(0.4, "[1] of 2 " + "answers " * 8)
        tell(0.5, "at once")
        clock.advance(1000.0)
        tell(0.6, "")
    first, second = log.getvalue().splitlines()
    assert first.startswith("simulating: 40% after 1 s, [1] of 2 answers")
    assert second == "simulating: 60% after 2 s"


def test_a_terminal_has_a_bar_with_the_note_which_goes_away() -> None:
    screen = io.StringIO()
    with progress("planning", Console(file=screen, force_terminal=True, width=120)) as tell:
        tell(0.5, "adaptive: [3] replicas")
    shown = screen.getvalue()
    assert "planning" in shown
    assert "adaptive: [3] replicas" in shown
    assert shown.endswith("\x1b[2K")  # the line is cleared


@pytest.mark.parametrize("every_ms", [10.0, 500.0])
def test_now_and_then_is_not_at_once(every_ms: float) -> None:
    clock = ManualClock()
    pause = NowAndThen(every_ms, clock)
    assert not pause.due()
    clock.advance(every_ms)
    assert pause.due()
    assert not pause.due()
