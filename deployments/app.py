"""The application that `serve run configs/<name>.yaml` builds.

NOTE: no `from __future__ import annotations` here: Serve validates `args` by the builder's annotation and
skips that silently when annotations are strings.
"""

from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from deployments.ingress import Ingress, TextFactory, model_text
from deployments.server import LLMServer
from dspark_ray.core.config import AppConfig, ServingConfig, with_absolute_paths
from dspark_ray.preflight.check import require_sound
from dspark_ray.runtime.engine_actor import EngineFactory
from dspark_ray.runtime.engine_factory import ENGINE_FACTORIES
from dspark_ray.runtime.placement import replica_placement
from dspark_ray.serving.api_keys import KeyRing

INGRESS_ONGOING = 10_000  # the ingress never queues in the proxy: it answers 503 itself, and /health always
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_S = 30.0  # a request that runs longer is resumed on another replica
DRAIN_POLL_S = 0.5
PROJECT_DIR = Path(__file__).resolve().parent.parent


def build_app(args: AppConfig) -> Application:
    """The builder named in `import_path`; `args` are the application's `args` in the YAML."""
    config = with_absolute_paths(args, (Path.cwd(), PROJECT_DIR))
    require_sound(config)
    if config.security.api_keys_file is not None:
        KeyRing.of(config.security)  # a broken file is told here, not by an ingress that does not start
    return assemble(config, ENGINE_FACTORIES[config.engine.kind], model_text)


def assemble(config: AppConfig, factory: EngineFactory, text_factory: TextFactory) -> Application:
    """Ingress → LLMServer. The factories are called in the replicas: engine there, tokenizer here."""
    serving, placement = config.serving, replica_placement(config)
    server = _deployment(
        LLMServer,
        **replica_options(serving),
        max_ongoing_requests=config.max_ongoing_requests,
        # Room for every running request of a replica that dies, beside an equal number of new ones.
        max_queued_requests=config.max_ongoing_requests * serving.most_replicas,
        placement_group_bundles=list(placement.bundles),
        placement_group_strategy=placement.strategy,
        request_router_config=router_config(serving),
    )
    ingress = _deployment(
        Ingress, num_replicas=serving.num_ingress_replicas, max_ongoing_requests=INGRESS_ONGOING
    )
    return ingress.bind(config, server.bind(config, factory), text_factory)


def replica_options(serving: ServingConfig) -> dict[str, Any]:
    """How many replicas: a number, or a policy that decides. Its delays are its own, Serve adds none."""
    scaling = serving.autoscaling
    if scaling is None:
        return {"num_replicas": serving.num_replicas}
    first = min(max(serving.num_replicas, scaling.min_replicas), scaling.max_replicas)
    config = AutoscalingConfig(
        min_replicas=scaling.min_replicas,
        max_replicas=scaling.max_replicas,
        initial_replicas=first,
        metrics_interval_s=scaling.stats_period_s,
        look_back_period_s=2 * scaling.stats_period_s,
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        policy=AutoscalingPolicy(
            policy_function="deployments.autoscaling:GoodputAutoscaler",
            policy_kwargs=scaling.model_dump(mode="json"),
        ),
    )
    return {"autoscaling_config": config}


def router_config(serving: ServingConfig) -> RequestRouterConfig:
    """Who picks the replica of each request."""
    if serving.router == "pow2":
        return RequestRouterConfig()
    options: dict[str, Any] = {  # its own type hints take no values
        "request_router_class": "deployments.router:GoodputRouter",
        "request_routing_stats_period_s": serving.router_stats_period_s,
    }
    return RequestRouterConfig(**options)


def _deployment(replica_class: type, **options: Any) -> Any:
    decorate: Any = serve.deployment  # its type hints know only the form with arguments
    return decorate(replica_class).options(
        ray_actor_options={"num_cpus": 0},  # the engine's actor holds the CPUs
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        **options,
    )
