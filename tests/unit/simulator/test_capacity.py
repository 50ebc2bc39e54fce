"""What one replica carries at random arrivals: known laws of queues, and the simulator's own traffic."""

from pathlib import Path

import pytest

from dspark_ray.core.types import VerificationMode
from dspark_ray.simulator.capacity import LoadPoint, ReplicaCapacity
from dspark_ray.simulator.planner import Candidate, capacity, curve
from tests.unit.simulator.scenarios import run, scenario, setting


def test_a_server_that_does_not_slow_down_is_the_simplest_queue() -> None:
    one = ReplicaCapacity([LoadPoint(1, 0.1, 10.0, 0.0), LoadPoint(64, 0.1, 10.0, 0.0)], 10, 64, 4000)
    half = one.at(5.0)  # M/M/1 at half load: one request is there in the mean
    assert half.requests == pytest.approx(1.0, rel=1e-3)
    assert half.tpot_ms == pytest.approx(20.0, rel=1e-3)
    most = one.most(100.0)
    assert most is not None
    assert most.rate_per_s == pytest.approx(9.0, rel=0.02)  # ρ / (1 − ρ) = 9 requests at ρ = 0.9
    assert one.most(9.0) is None  # alone, a token takes 10 ms


def test_requests_that_do_not_slow_each_other_down_have_one_speed_at_any_rate() -> None:
    points = [LoadPoint(n, 0.1 / n, 10.0, 3.0) for n in (1, 64)]
    one = ReplicaCapacity(points, 10, 64, 100)
    assert one.at(3.0).tpot_ms == pytest.approx(10.0)
    assert one.at(100.0).tpot_ms == pytest.approx(10.0)
    assert one.at(100.0).budget_tokens == pytest.approx(3.0)


def test_it_foretells_the_traffic_that_is_simulated(tmp_path: Path) -> None:
    made, found = scenario(tmp_path), setting(tmp_path)
    paper = capacity(made, found, curve(made, found, Candidate("adaptive", VerificationMode.ADAPTIVE)))
    most = paper.most(13.0)
    assert most is not None
    engine = {"max_running": 8, "max_step_rows": 256, "kv_num_blocks": 512, "max_waiting": 64}
    figures = run(
        tmp_path,
        duration_s=60,
        replicas=[{"step_table": "table.json", "engine": engine}],
        arrivals={"kind": "poisson", "rate_per_s": most.rate_per_s},
    ).figures
    assert figures["tpot_ms"]["mean"] == pytest.approx(13.0, rel=0.1)
    assert figures["budget_tokens"] == pytest.approx(most.budget_tokens, rel=0.2)
