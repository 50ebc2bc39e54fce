"""Whole simulations: conservation, queues, memory, faults, plans, and the short cut against every step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_ray.core.errors import ConfigError
from dspark_ray.simulator.routing import ROUTERS, FleetLoad, ReplicaFacts
from dspark_ray.simulator.run import prepare, simulate
from dspark_ray.simulator.scenario import Scenario, load_scenario
from dspark_ray.simulator.step_times import StepTimes
from dspark_ray.simulator.workload import Batch
from tests.unit.simulator.scenarios import CONDITIONAL, STEEP_TABLE, run, scenario

ROOT = Path(__file__).resolve().parents[3]
TASK = {
    "name": "chat",
    "prompt_tokens": {"mean": 40},
    "output_tokens": {"mean": 60},
    "acceptance": {"conditional": CONDITIONAL},
}
SHIPPED = sorted((ROOT / "configs" / "simulation").glob("*.yaml"))


def closed(tmp_path: Path, clients: int, mode: str, num_requests: int, tokens: int = 40) -> dict[str, Any]:
    """Equal requests through one replica, without drafts' randomness in their lengths."""
    one = scenario(tmp_path).replicas[0].model_dump()
    changed = scenario(
        tmp_path,
        duration_s=1000,
        replicas=[{**one, "count": 1}],
        arrivals={"kind": "closed", "clients": clients},
        speculation={"mode": mode, "num_draft_tokens": 4},
    )
    size = np.full(num_requests, 1)
    requests = Batch(np.zeros(num_requests), 8 * size, tokens * size, 0 * size)
    return simulate(changed, requests=requests).figures


def test_plain_decoding_costs_what_the_table_says(tmp_path: Path) -> None:
    figures = closed(tmp_path, clients=1, mode="off", num_requests=3)
    # A prompt of 8 rows, then 39 tokens of one row each; the context is free on this table.
    expected_s = 3 * (STEEP_TABLE.verify_cost_ms(8) + 39 * STEEP_TABLE.verify_cost_ms(1)) / 1e3
    assert figures["measured_s"] == pytest.approx(expected_s, rel=1e-6)
    assert figures["tau"] == pytest.approx(1.0)
    assert figures["drafted_tokens"] == 0


def test_requests_in_flight_share_steps(tmp_path: Path) -> None:
    figures = closed(tmp_path, clients=4, mode="off", num_requests=4)
    expected_s = (STEEP_TABLE.verify_cost_ms(32) + 39 * STEEP_TABLE.verify_cost_ms(4)) / 1e3
    assert figures["measured_s"] == pytest.approx(expected_s, rel=1e-6)
    assert figures["requests_decoding"] == pytest.approx(4.0)


def test_every_token_is_emitted_once_whatever_is_verified(tmp_path: Path) -> None:
    for mode in ("off", "fixed", "threshold", "algorithm1", "adaptive"):
        figures = closed(tmp_path, clients=6, mode=mode, num_requests=12)
        assert figures["answers"] == 12
        assert figures["tokens_per_s"] * figures["measured_s"] == pytest.approx(12 * 40)


def test_speculation_pays_where_the_table_says_so(tmp_path: Path) -> None:
    def speed(mode: str, clients: int) -> float:
        return closed(tmp_path, clients, mode, 3 * clients)["tokens_per_s"]

    alone = {mode: speed(mode, 1) for mode in ("off", "fixed", "adaptive")}
    assert min(alone["fixed"], alone["adaptive"]) > 1.3 * alone["off"]
    full = {mode: speed(mode, 8) for mode in ("off", "fixed", "adaptive")}
    assert full["fixed"] < full["off"]  # 32 more rows cost more than they bring
    assert full["adaptive"] > 0.95 * full["off"]


def test_a_seed_repeats_and_another_one_differs(tmp_path: Path) -> None:
    first, again = run(tmp_path, seed=3), run(tmp_path, seed=3)
    assert first.figures == again.figures
    assert first.timeline == again.timeline
    assert run(tmp_path, seed=4).figures != first.figures


def test_the_look_up_by_load_agrees_with_every_step(tmp_path: Path) -> None:
    changes = {"duration_s": 20, "arrivals": {"kind": "poisson", "rate_per_s": 10}}
    exact, load = (run(tmp_path, law=law, **changes).figures for law in ("exact", "load"))
    for name in ("tokens_per_s", "tau", "step_ms", "requests_decoding", "budget_tokens"):
        assert load[name] == pytest.approx(exact[name], rel=0.15), name
    assert load["tpot_ms"]["p50"] == pytest.approx(exact["tpot_ms"]["p50"], rel=0.12)
    assert load["ttft_ms"]["p50"] == pytest.approx(exact["ttft_ms"]["p50"], rel=0.12)
    assert exact["budget_tokens"] > 1  # else there is nothing to agree about


def test_lengths_of_a_list_and_drafts_that_end_with_max_tokens(tmp_path: Path) -> None:
    kind = {**scenario(tmp_path).replicas[0].model_dump(), "count": 1}

    def verified(most: int) -> float:
        """Draft tokens verified an answer, each of 3 tokens."""
        task = {**TASK, "prompt_tokens": {"values": [8]}, "output_tokens": {"values": [3], "most": most}}
        arrivals = {"kind": "closed", "clients": 1}
        speculation = {"mode": "fixed", "num_draft_tokens": 4}
        changes = {"replicas": [kind], "arrivals": arrivals, "speculation": speculation, "duration_s": 4}
        figures = run(tmp_path, tasks=[task], **changes).figures
        assert figures["tokens_per_s"] / figures["requests_per_s"] == pytest.approx(3.0, rel=0.02)
        return figures["verified_tokens"] / figures["answers"]

    # Two tokens are left after the first: one draft token and the target's own end the answer.
    assert verified(most=3) <= 1.02
    assert verified(most=100) > 3.9


def test_policies_learn_what_steps_really_take(tmp_path: Path) -> None:
    """Speculation that pays by the table, and never does in the machine, is off after some steps."""
    changes = {
        "duration_s": 20,
        "warm_up_s": 5,
        "arrivals": {"kind": "closed", "clients": 2},
        "replicas": [{**scenario(tmp_path).replicas[0].model_dump(), "count": 1}],
    }
    made = scenario(tmp_path, **changes)
    name = made.replicas[0].step_table
    dear = replace(STEEP_TABLE, verify_ms=3 * STEEP_TABLE.verify_ms)
    as_told = simulate(made).figures
    figures = {
        between: simulate(
            made, setting=prepare(made, times={name: StepTimes(STEEP_TABLE, dear, between_ms=between)})
        ).figures
        for between in (0.0, 5.0)
    }
    assert as_told["budget_tokens"] > 1
    assert figures[0.0]["budget_tokens"] < 0.3
    assert figures[5.0]["step_ms"] == pytest.approx(figures[0.0]["step_ms"] + 5.0, rel=0.05)


def test_a_full_queue_refuses(tmp_path: Path) -> None:
    figures = run(tmp_path, arrivals={"kind": "poisson", "rate_per_s": 200}, duration_s=3, law="load").figures
    assert figures["refused"] > 0
    assert figures["slo_attainment"] < 1


def test_scarce_memory_preempts_and_loses_nothing(tmp_path: Path) -> None:
    engine = {"max_running": 16, "max_step_rows": 256, "kv_num_blocks": 128, "max_waiting": 512}
    kind = {"count": 1, "step_table": "table.json", "engine": engine}
    changes = {
        "replicas": [kind],
        "arrivals": {"kind": "closed", "clients": 14},
        "tasks": [
            {
                "name": "long",
                "prompt_tokens": {"mean": 100, "spread": 0},
                "output_tokens": {"mean": 200, "spread": 0},
                "acceptance": {"conditional": [0.5] * 4},
            }
        ],
    }
    size = np.full(20, 1)
    figures = simulate(
        scenario(tmp_path, duration_s=1000, **changes),
        requests=Batch(np.zeros(20), 100 * size, 200 * size, 0 * size),
    ).figures
    assert figures["preemptions"] > 0
    assert figures["answers"] == 20
    assert figures["tokens_per_s"] * figures["measured_s"] == pytest.approx(20 * 200)


def test_requests_survive_a_replicas_death(tmp_path: Path) -> None:
    quiet = run(tmp_path).figures
    figures = run(tmp_path, faults=[{"at_s": 3, "replica": 0}]).figures
    assert figures["resumed"] > 0
    assert figures["answers"] + figures["unanswered"] == pytest.approx(
        quiet["answers"] + quiet["unanswered"], abs=1
    )
    assert figures["ttft_ms"]["p99"] > 0


def test_a_lone_replica_that_dies_leaves_requests_waiting(tmp_path: Path) -> None:
    kind = {**scenario(tmp_path).replicas[0].model_dump(), "count": 1}
    figures = run(tmp_path, duration_s=9, replicas=[kind], faults=[{"at_s": 1, "replica": 0}]).figures
    assert figures["ttft_ms"]["p99"] > 2000  # five seconds without a replica


@pytest.mark.parametrize("law", ["exact", "load"])
def test_a_cap_binds(tmp_path: Path, law: str) -> None:
    def verified_per_s(cap: float | None) -> float:
        scheduler = {"policy": "shared_cap", "cap_draft_tokens_per_s": cap} if cap else {}
        figures = run(tmp_path, law=law, duration_s=4, scheduler=scheduler).figures
        return figures["verified_tokens"] / figures["measured_s"]

    free = verified_per_s(None)
    assert verified_per_s(free / 3) < 0.45 * free


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[float] = []
    simulate(scenario(tmp_path), on_progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_scenarios_load(path: Path) -> None:
    assert isinstance(load_scenario(path), Scenario)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arrivals": {"kind": "poisson"}}, "rate_per_s"),
        ({"arrivals": {"kind": "closed"}}, "clients"),
        ({"speculation": {"num_draft_tokens": 7}}, "conditional has 4"),
        ({"faults": [{"at_s": 1, "replica": 2}]}, "no replica 2"),
        ({"unknown": 1}, "unknown"),
        ({"scheduler": {"policy": "lockstep"}}, "steps_together: true"),
        ({"steps_together": True, "law": "load"}, "exact or auto"),
        ({"warm_up_s": 5}, "warm_up_s"),
        ({"tasks": [{**TASK, "output_tokens": {"mean": 5, "values": [3]}}]}, "either mean or values"),
        ({"tasks": [{**TASK, "output_tokens": {"spread": 0.1}}]}, "either mean or values"),
        ({"replicas": [{"step_table": "absent.json"}]}, "absent.json does not exist"),
    ],
)
def test_a_wrong_scenario_is_told(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scenario(tmp_path, **changes)


@pytest.mark.parametrize("router", ROUTERS.names())
def test_routers_use_replicas_that_are_ready(router: str) -> None:
    rng = np.random.default_rng(0)
    size = np.full(400, 5)
    busy = np.array([9, 0, 9, 9])
    batch = Batch(np.arange(400.0), size, size, 0 * size)
    load = FleetLoad(busy, 0 * busy, 1000 + 0 * busy)
    facts = [ReplicaFacts(16, ((1, 100.0), (16, 400.0)), 0.1)] * 4
    chosen = ROUTERS.get(router)(rng, facts).choose(batch, load, np.array([1, 2, 3]))
    counts = np.bincount(chosen, minlength=4)
    assert counts[0] == 0
    assert counts.sum() == 400
    assert (counts[1:] > 60).all()
    assert router == "random" or counts[1] == counts.max()  # it was the emptiest


def test_current_scores_are_worth_something(tmp_path: Path) -> None:
    """Blocks of a request differ at random here: what they were two drafts ago says little."""
    task = scenario(tmp_path).tasks[0].model_dump()
    tasks = [{**task, "acceptance": {"conditional": CONDITIONAL, "spread": 3.0, "persistence": 0.0}}]
    kind = scenario(tmp_path).replicas[0].model_dump()
    changes = {
        "duration_s": 30,
        "tasks": tasks,
        "replicas": [{**kind, "count": 1}],
        "arrivals": {"kind": "closed", "clients": 8},
    }
    speculation = {"mode": "adaptive", "num_draft_tokens": 4}
    current = run(tmp_path, speculation=speculation, **changes).figures
    stale = run(tmp_path, speculation={**speculation, "current_scores": False}, **changes).figures
    assert current["budget_tokens"] != stale["budget_tokens"]
    assert current["tokens_per_s"] > 0.99 * stale["tokens_per_s"]


def in_step(tmp_path: Path, policy: str, seed: int, together: bool = True) -> dict[str, Any]:
    """Three replicas, now this one busier and now that one, for some seconds."""
    return run(
        tmp_path,
        duration_s=8,
        seed=seed,
        replicas=[{**scenario(tmp_path).replicas[0].model_dump(), "count": 3}],
        arrivals={"kind": "closed", "clients": 15},
        router="random",
        scheduler={"policy": policy},
        steps_together=together,
    ).figures


def test_replicas_that_step_together_wait_for_the_slowest(tmp_path: Path) -> None:
    gains = []
    for seed in range(3):  # chance is worth as much as the policy in so short a run
        apart, local, lockstep = (
            in_step(tmp_path, "local", seed, together=False),
            in_step(tmp_path, "local", seed),
            in_step(tmp_path, "lockstep", seed),
        )
        assert local["tokens_per_s"] < 0.97 * apart["tokens_per_s"]
        assert local["step_ms"] > 1.03 * apart["step_ms"]
        gains.append(lockstep["tokens_per_s"] / local["tokens_per_s"])
    # Planned together, no member verifies what all others would wait for, or leaves free tokens unused.
    assert np.mean(gains) > 1.02


@pytest.mark.parametrize("law", ["exact", "load"])
def test_a_request_that_is_owed_a_speed_is_nearer_to_it(tmp_path: Path, law: str) -> None:
    task = scenario(tmp_path).tasks[0].model_dump()
    tasks = [
        {**task, "name": "owed", "target_tokens_per_s": 150.0},
        {**task, "name": "flex", "tier": "flex", "share": 2},
    ]
    kind = {**scenario(tmp_path).replicas[0].model_dump(), "count": 1}
    found = {
        policy: run(
            tmp_path,
            duration_s=15,
            replicas=[kind],
            tasks=tasks,
            arrivals={"kind": "closed", "clients": 8},
            scheduler={"policy": policy},
            law=law,
        ).figures["tasks"]
        for policy in ("local", "weighted")
    }
    local, weighted = found["local"], found["weighted"]
    equal = local["owed"]["tokens_per_s_of_a_user"] / local["flex"]["tokens_per_s_of_a_user"]
    assert equal == pytest.approx(1.0, abs=0.1)
    gained = weighted["owed"]["tokens_per_s_of_a_user"] / weighted["flex"]["tokens_per_s_of_a_user"]
    assert gained > 1.2
    assert weighted["owed"]["reached_target"] >= local["owed"]["reached_target"]
    assert weighted["flex"]["reached_target"] is None
