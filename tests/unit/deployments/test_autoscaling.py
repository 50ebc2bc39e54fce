"""Serve's contexts become decisions; a dry run only says what it would do."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig

from deployments import autoscaling
from deployments.app import replica_options
from deployments.autoscaling import GoodputAutoscaler
from dspark_ray.core.clock import ManualClock
from dspark_ray.core.config import AutoscalingConfig as Settings
from dspark_ray.core.config import ServingConfig

FIGURES = {
    "emitted_tokens_per_s": 95.0,
    "waiting_tokens": 0.0,
    "tokens_per_request": 50.0,
    "capacity_tokens_per_s": 100.0,
    "num_requests": 4.0,
}


def context(metrics: dict[str, Any], **fields: Any) -> Any:
    known = {"total_queued_requests": 0.0, "target_num_replicas": 1, "current_time": 5.0, "policy_state": {}}
    return SimpleNamespace(
        **{**known, **fields}, deployment_name="LLMServer", running_replicas=["a"], aggregated_metrics=metrics
    )


def policy(clock: ManualClock | None = None, **keys: Any) -> GoodputAutoscaler:
    made = GoodputAutoscaler(**Settings(max_replicas=3, **keys).model_dump(mode="json"))
    made._clock = clock or ManualClock()
    return made


def test_a_busy_replica_gets_another_and_the_state_goes_on() -> None:
    metrics = {name: {"a": value} for name, value in FIGURES.items()}
    clock = ManualClock(5000.0)
    busy = policy(clock)
    wanted, state = busy(context(metrics))
    assert wanted == 2
    clock.advance(1000.0)
    again, later = busy(context(metrics, policy_state=state, target_num_replicas=2))
    assert again == 2
    assert later["dspark"]["at_s"] == 6.0


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_jump_of_the_machines_clock_changes_nothing(jump_s: float) -> None:
    idle = {**FIGURES, "emitted_tokens_per_s": 5.0, "num_requests": 1.0}
    metrics = {name: {"a": value} for name, value in idle.items()}
    clock, wall_s, state, wanted = ManualClock(), 1e9, {}, []
    patient = policy(clock, down_after_s=10.0)
    for second in range(16):
        wall_s += jump_s if second == 3 else 1.0
        clock.advance(1000.0)
        number, state = patient(
            context(metrics, policy_state=state, target_num_replicas=2, current_time=wall_s)
        )
        wanted.append(number)
    assert wanted[:10] == [2] * 10
    assert 1 in wanted[10:]


def test_incomplete_figures_change_nothing() -> None:
    metrics = {name: {"a": value} for name, value in list(FIGURES.items())[:-1]}
    assert policy()(context(metrics))[0] == 1
    assert policy()(context({}))[0] == 1


def test_a_dry_run_says_what_it_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(autoscaling.logger, "info", lambda text, *values: said.append(text % values))
    metrics = {name: {"a": value} for name, value in FIGURES.items()}
    dry = policy(dry_run=True)
    assert [dry(context(metrics))[0] for _ in range(3)] == [1, 1, 1]
    what = "demand 95 tokens/s, capacity 100"
    assert said == [f"autoscaling of LLMServer would go from 1 to 2 replicas: {what}"]


def test_serve_is_given_the_policy_or_a_number() -> None:
    assert replica_options(ServingConfig(num_replicas=2)) == {"num_replicas": 2}
    options = replica_options(
        ServingConfig(num_replicas=9, autoscaling=Settings(min_replicas=0, max_replicas=3))
    )
    config = options["autoscaling_config"]
    assert isinstance(config, AutoscalingConfig)
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (0, 3, 3)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (0.0, 0.0)
