"""Serve's contexts become decisions; a dry run only says what it would do."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig

from deployments import autoscaling
from deployments.app import replica_options
from deployments.autoscaling import GoodputAutoscaler
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


def policy(**keys: Any) -> GoodputAutoscaler:
    return GoodputAutoscaler(**Settings(max_replicas=3, **keys).model_dump(mode="json"))


def test_a_busy_replica_gets_another_and_the_state_goes_on() -> None:
    metrics = {name: {"a": value} for name, value in FIGURES.items()}
    wanted, state = policy()(context(metrics))
    assert wanted == 2
    again, later = policy()(context(metrics, policy_state=state, target_num_replicas=2, current_time=6.0))
    assert again == 2
    assert later["dspark"]["at_s"] == 6.0


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
