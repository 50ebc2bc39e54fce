"""The training display keeps the latest of every figure; TensorBoard gets one scalar a position."""

import io
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console
from rich.live import Live

from dspark_ray.cli.train_progress import TrainingDisplay
from dspark_ray.core.errors import ConfigError


def test_the_latest_figures_are_shown() -> None:
    screen = io.StringIO()
    with Live(console=Console(file=screen, force_terminal=True, width=100)) as live:
        display = TrainingDisplay(live, total_steps=10)
        display.figures(3, {"loss": 2.5, "blocks_per_s": 12.0})
        positions = {"acceptance_sampling": [0.5, 0.25, 1.0], "acceptance_greedy": []}
        display.figures(4, {"tau_sampling": 1.75, **positions})
        display.figures(5, {"loss": 2.25})
    last = screen.getvalue().rsplit("5/10", 1)[1]
    assert "2.25" in last
    assert "2.5 " not in last
    assert "1.75" in last
    assert "▅▃█  0.50 0.25 1.00" in last
    assert "acceptance_greedy" not in last


def test_the_cache_has_a_bar_while_it_grows() -> None:
    screen = io.StringIO()
    with Live(console=Console(file=screen, force_terminal=True, width=100)) as live:
        display = TrainingDisplay(live, total_steps=10)
        display.caching(0.5)
        live.refresh()
        assert "caching" in screen.getvalue()
        display.caching(1.0)
        seen = len(screen.getvalue())
        live.refresh()
    assert "0/10" in screen.getvalue()[seen:]
    assert "caching" not in screen.getvalue()[seen:]


def test_tensorboard_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dspark_ray.training.tensorboard import TensorBoardLog

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"dspark-ray\[tensorboard\]"):
        TensorBoardLog(tmp_path)

    written: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None: ...

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def flush(self) -> None: ...

    fake = ModuleType("tensorboard")
    fake.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    TensorBoardLog(tmp_path).figures(7, {"loss": 1.5, "acceptance": [0.5, 0.25]})
    assert written == [("loss", 1.5, 7), ("acceptance/1", 0.5, 7), ("acceptance/2", 0.25, 7)]
