"""Autoscaling on the simulation's clock: it follows the load, loses nothing, and is paid for by the hour."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from dspark_ray.core.errors import ConfigError
from dspark_ray.simulator.run import Result, simulate
from dspark_ray.simulator.scenario import Scenario
from tests.unit.simulator.scenarios import scenario

SCALING: dict[str, Any] = {
    "min_replicas": 1, "max_replicas": 4, "target_tokens_per_s": 20.0, "down_after_s": 4.0,
}  # fmt: skip
WAVE = {"kind": "diurnal", "rate_per_s": 9, "swing": 1.0, "period_s": 100}


def scaled(tmp_path: Path, changes: dict[str, Any] | None = None, **top: Any) -> Scenario:
    """A hundred seconds in which the load goes from none to a peak and back, law `load`."""
    kind = scenario(tmp_path).replicas[0].model_dump()
    replicas = [{**kind, "count": 4, "price_per_hour": 1.0, "start_up_s": 5.0}]
    fields = {"duration_s": 100, "law": "load", "arrivals": WAVE, "replicas": replicas, **top}
    return scenario(tmp_path, autoscaling={**SCALING, **(changes or {})}, **fields)


def num_replicas(result: Result) -> list[int]:
    return [int(point["replicas"]) for point in result.timeline]


def test_replicas_follow_the_load(tmp_path: Path) -> None:
    result = simulate(scaled(tmp_path))
    counts = num_replicas(result)
    assert counts[0] == 1
    assert max(counts) >= 2
    assert counts[-1] < max(counts)
    still = simulate(scenario(tmp_path, **{**scaled(tmp_path).model_dump(), "autoscaling": None}))
    assert result.figures["cost"] < 0.8 * still.figures["cost"]
    assert still.figures["replicas"] == pytest.approx(4.0)
    assert 1.0 < result.figures["replicas"] < 3.5
    assert result.figures["slo_attainment"] > 0.9
    assert simulate(scaled(tmp_path)) == result


def test_no_request_is_lost_in_a_drain(tmp_path: Path) -> None:
    """After the peak every request is answered, though replicas went meanwhile."""
    quiet = {"kind": "bursty", "rate_per_s": 0.01, "burst_factor": 2000.0, "calm_s": 20.0, "burst_s": 5.0}
    result = simulate(scaled(tmp_path, {"down_after_s": 0.0}, arrivals=quiet, seed=2))
    counts = num_replicas(result)
    assert any(later < earlier for earlier, later in itertools.pairwise(counts))
    figures = result.figures
    assert figures["resumed"] == 0
    assert figures["answers"] > 50
    assert figures["unanswered"] <= 20  # of the last second


def test_a_start_takes_its_time(tmp_path: Path) -> None:
    kind = scaled(tmp_path).replicas[0].model_dump()
    slow = simulate(scaled(tmp_path, replicas=[{**kind, "start_up_s": 30.0}]))
    quick = simulate(scaled(tmp_path, replicas=[{**kind, "start_up_s": 0.0}]))
    assert slow.figures["slo_attainment"] < quick.figures["slo_attainment"]

    def first_second(result: Result) -> float:
        return next(point["from_s"] for point in result.timeline if point["replicas"] > 1)

    assert first_second(slow) >= first_second(quick) + 25.0


def test_none_when_nobody_asks(tmp_path: Path) -> None:
    """The first request waits for a whole start, and is answered."""
    rare = {"kind": "poisson", "rate_per_s": 0.008}
    none = {"min_replicas": 0, "down_after_s": 5.0}
    figures = simulate(scaled(tmp_path, none, arrivals=rare, duration_s=1000, seed=1)).figures
    assert figures["answers"] > 3
    assert figures["replicas"] < 0.9
    assert figures["ttft_ms"]["p99"] >= 4000.0


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    assert set(num_replicas(simulate(scaled(tmp_path, {"dry_run": True}, duration_s=30)))) == {1}


def test_a_dead_replica_is_replaced(tmp_path: Path) -> None:
    faults = ({"at_s": 45.0, "replica": 0},)
    result = simulate(scaled(tmp_path, {"min_replicas": 2}, faults=faults))
    assert result.figures["resumed"] > 0
    assert result.figures["answers"] > 500


def test_more_than_there_are_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_replicas is 5, and there are 4"):
        scaled(tmp_path, {"max_replicas": 5})
