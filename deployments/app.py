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
from dspark_ray.core.config import AppConfig
from dspark_ray.core.errors import ConfigError
from dspark_ray.runtime.engine_actor import EngineFactory
from dspark_ray.runtime.engine_factory import native_engine

INGRESS_ONGOING = 10_000  # the ingress never queues in the proxy: it answers 503 itself, and /health always
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_S = 30.0  # a request that runs longer is resumed on another replica
DRAIN_POLL_S = 0.5
DEFAULT_SOURCE = "default"
PROJECT_DIR = Path(__file__).resolve().parent.parent


def build_app(args: AppConfig) -> Application:
    """The builder named in `import_path`; `args` are the application's `args` in the YAML."""
    return assemble(with_absolute_paths(args), native_engine, model_text)


def assemble(config: AppConfig, engine_factory: EngineFactory, text_factory: TextFactory) -> Application:
    """Ingress → LLMServer. The factories are called in the replicas: engine there, tokenizer here."""
    serving = config.serving
    server = _deployment(
        LLMServer,
        num_replicas=serving.num_replicas,
        max_ongoing_requests=serving.max_ongoing_requests,
        # Room for every running request of a replica that dies, beside an equal number of new ones.
        max_queued_requests=serving.max_ongoing_requests * serving.num_replicas,
        placement_group_bundles=[{"CPU": max(serving.replica_cpus, 0.01)}],
        placement_group_strategy="STRICT_PACK",
    )
    ingress = _deployment(
        Ingress, num_replicas=serving.num_ingress_replicas, max_ongoing_requests=INGRESS_ONGOING
    )
    return ingress.bind(config, server.bind(config, engine_factory), text_factory)


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


def with_absolute_paths(config: AppConfig) -> AppConfig:
    """Files named relative to the working directory, or else to the project, made absolute.

    Replicas run in other directories than the shell that started them. Raises `ConfigError` for a file
    that does not exist: found here it costs a second, found in the replicas it costs their retries.
    """
    speculation = config.speculation
    drafter = speculation.drafter
    path = _existing("speculation.drafter.path", drafter.path) if drafter.kind == "dspark" else drafter.path
    updates = {
        "drafter": drafter.model_copy(update={"path": path}),
        "temperatures": _existing("speculation.temperatures", speculation.temperatures),
        "step_table": _existing("speculation.step_table", speculation.step_table),
    }
    source = config.model.source
    if source != DEFAULT_SOURCE:
        source = _find(source) or source  # or a hub id
    model = config.model.model_copy(update={"source": source})
    return config.model_copy(update={"model": model, "speculation": speculation.model_copy(update=updates)})


def _existing(key: str, path: str | None) -> str | None:
    if path is None:
        return None
    found = _find(path)
    if found is None:
        raise ConfigError(f"{key}: {path!r} does not exist, here or under {PROJECT_DIR}")
    return found


def _find(path: str) -> str | None:
    """The absolute path, or None."""
    for base in (Path.cwd(), PROJECT_DIR):
        candidate = base / Path(path).expanduser()
        if candidate.exists():
            return str(candidate.resolve())
    return None
