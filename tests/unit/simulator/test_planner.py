"""Sizing a fleet: curves by load, the SLO, and what traffic makes of it."""

from pathlib import Path

import pytest

from dspark_ray.cli.plan import draw
from dspark_ray.core.errors import ConfigError
from dspark_ray.core.types import VerificationMode
from dspark_ray.simulator.planner import Candidate, candidates, curve, loads, plan
from dspark_ray.simulator.run import simulate
from tests.unit.simulator.scenarios import STEEP_TABLE, scenario, setting

OFF = Candidate("off", VerificationMode.OFF)


def test_loads_reach_the_limit() -> None:
    assert loads(16) == [1, 2, 3, 4, 6, 8, 12, 16]


def test_a_curve_without_drafts_is_the_table(tmp_path: Path) -> None:
    found = curve(scenario(tmp_path), setting(tmp_path), OFF)
    for point in found.points:
        assert point.step_ms == pytest.approx(STEEP_TABLE.verify_cost_ms(point.requests))
        assert (point.tau, point.budget_tokens) == (1.0, 0.0)


def test_adaptive_never_loses_much_to_any_fixed_length(tmp_path: Path) -> None:
    made = setting(tmp_path)
    curves = {c.name: curve(scenario(tmp_path), made, c).points for c in candidates(4)}
    for name, points in curves.items():
        for mine, other in zip(curves["adaptive"], points, strict=True):
            assert mine.tokens_per_s > 0.93 * other.tokens_per_s, (name, mine.requests)
    assert curves["adaptive"][0].budget_tokens > 1
    assert curves["fixed 4"][-1].tokens_per_s < curves["off"][-1].tokens_per_s


def test_a_plan_sizes_by_the_slo(tmp_path: Path) -> None:
    arrivals = {"kind": "poisson", "rate_per_s": 30}

    def replicas(tpot_ms: float, check: bool = False) -> dict[str, int | None]:
        slo = {"tpot_ms": tpot_ms, "ttft_ms": 2000}
        answers, _ = plan(scenario(tmp_path, arrivals=arrivals, slo=slo), fixed=[2], check=check)
        return {answer.policy: answer.replicas for answer in answers}

    relaxed, tight, impossible = replicas(15.0), replicas(9.0), replicas(1.0)
    assert relaxed["adaptive"] is not None
    assert relaxed["off"] is not None
    assert tight["off"] is None  # a plain step takes 10 ms
    assert tight["adaptive"] is not None
    assert tight["adaptive"] > relaxed["adaptive"]
    assert set(impossible.values()) == {None}


def test_a_plan_holds_in_traffic(tmp_path: Path) -> None:
    changes = {
        "duration_s": 6,
        "arrivals": {"kind": "poisson", "rate_per_s": 10},
        "slo": {"tpot_ms": 25.0, "ttft_ms": 1000},
    }
    answers, curves = plan(scenario(tmp_path, **changes), fixed=[1], target=0.9)
    assert len(answers) == len(curves) == 4
    for answer in answers:
        assert answer.slo_attainment is not None
        assert answer.slo_attainment >= 0.9
        assert answer.goodput_tokens_per_s == pytest.approx(10 * 60, rel=0.35)


def test_fleet_policies_are_compared(tmp_path: Path) -> None:
    task = scenario(tmp_path).tasks[0].model_dump()
    changes = {
        "duration_s": 2,
        "arrivals": {"kind": "poisson", "rate_per_s": 10},
        "slo": {"tpot_ms": 25.0, "ttft_ms": 1000},
        "tasks": [{**task, "target_tokens_per_s": 60.0}],
    }
    found, _ = plan(scenario(tmp_path, **changes), fixed=[], fleet_policies=["weighted"], target=0.5)
    by_name = {answer.policy: answer for answer in found}
    assert by_name["adaptive, weighted"].targets_reached is not None
    assert by_name["adaptive, weighted"].replicas == by_name["adaptive"].replicas
    with pytest.raises(ConfigError, match="steps_together"):
        plan(scenario(tmp_path, **changes), fleet_policies=["lockstep"])


def test_a_plan_needs_a_rate(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rate"):
        plan(scenario(tmp_path, arrivals={"kind": "closed", "clients": 3}))


def test_a_plan_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw([curve(scenario(tmp_path), setting(tmp_path), OFF)], tmp_path / "plan.png", 50.0)
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_a_last_step_emits_past_the_end(tmp_path: Path) -> None:
    """One request in a closed loop: steps of so many tokens are not cut to what an answer still needs."""
    task = scenario(tmp_path).tasks[0].model_dump()
    changes = {
        "duration_s": 400,
        "replicas": [{**scenario(tmp_path).replicas[0].model_dump(), "count": 1}],
        "arrivals": {"kind": "closed", "clients": 1},
        "tasks": [{**task, "prompt_tokens": {"values": [8]}, "output_tokens": {"values": [7]}}],
    }
    made = setting(tmp_path, **changes)
    fixed = Candidate("fixed 4", VerificationMode.FIXED, 4)
    point = curve(scenario(tmp_path, **changes), made, fixed).points[0]
    speculation = {"mode": "fixed", "num_draft_tokens": 4}
    figures = simulate(scenario(tmp_path, **changes, speculation=speculation)).figures
    steps = (6 + point.overshoot) / point.tau
    assert steps == pytest.approx(6 / figures["tau"], rel=0.06)
    assert point.overshoot > 0.7
    assert point.overshoot / point.tau > 0.3  # it matters
