"""Clocks go forwards; the manual one only when told to. Nothing is decided by the machine's date."""

import ast
from pathlib import Path

import pytest

from dspark_ray.core.clock import ManualClock, SystemClock


def test_the_manual_clock_moves_when_told() -> None:
    clock = ManualClock(5.0)
    clock.advance(2.5)
    assert clock.now_ms() == 7.5
    assert clock.now_ms() == 7.5


def test_no_clock_goes_backwards() -> None:
    with pytest.raises(AssertionError):
        ManualClock().advance(-1)
    clock = SystemClock()
    times_ms = [clock.now_ms() for _ in range(100)]
    assert times_ms == sorted(times_ms)


ROOT = Path(__file__).resolve().parents[2]
SERVED = ("core", "scheduling", "engine", "vllm_engine", "runtime", "serving", "observability")
WALL_CLOCK = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "time.localtime", "time.gmtime"}
# Dates in answers and traces; a number for each incarnation of an engine, which its name tells apart, too.
DATES = {
    "dspark_ray/serving/http.py": 2,
    "dspark_ray/serving/parsing.py": 1,
    "dspark_ray/serving/tracing.py": 3,
    "dspark_ray/runtime/engine_actor.py": 1,
}


def test_the_date_decides_nothing() -> None:
    """Whoever sets the machine's clock must not delay, drop or scale anything."""
    folders = [*(ROOT / "dspark_ray" / name for name in SERVED), ROOT / "deployments"]
    found: dict[str, int] = {}
    for path in (path for folder in folders for path in sorted(folder.rglob("*.py"))):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        calls = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
        number = sum(call.removeprefix("datetime.") in WALL_CLOCK or call in WALL_CLOCK for call in calls)
        if number:
            found[str(path.relative_to(ROOT))] = number
    assert found == DATES
