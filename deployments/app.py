"""The application that `serve run configs/<name>.yaml` builds.

NOTE: no `from __future__ import annotations` here: Serve validates `args` by the builder's annotation and
skips that silently when annotations are strings.
"""

from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application

from deployments.ingress import Ingress, TextFactory, model_text
from deployments.server import LLMServer
from dspark_ray.core.config import AppConfig, with_absolute_paths
from dspark_ray.preflight.check import require_sound
from dspark_ray.runtime.engine_actor import EngineFactory
from dspark_ray.runtime.engine_factory import ENGINE_FACTORIES
from dspark_ray.runtime.placement import replica_placement

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
    return assemble(config, ENGINE_FACTORIES[config.engine.kind], model_text)


def assemble(config: AppConfig, factory: EngineFactory, text_factory: TextFactory) -> Application:
    """Ingress → LLMServer. The factories are called in the replicas: engine there, tokenizer here."""
    serving, placement = config.serving, replica_placement(config)
    server = _deployment(
        LLMServer,
        num_replicas=serving.num_replicas,
        max_ongoing_requests=serving.max_ongoing_requests,
        # Room for every running request of a replica that dies, beside an equal number of new ones.
        max_queued_requests=serving.max_ongoing_requests * serving.num_replicas,
        placement_group_bundles=list(placement.bundles),
        placement_group_strategy=placement.strategy,
    )
    ingress = _deployment(
        Ingress, num_replicas=serving.num_ingress_replicas, max_ongoing_requests=INGRESS_ONGOING
    )
    return ingress.bind(config, server.bind(config, factory), text_factory)


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
