"""LLMServer: one replica per model copy; owns its placement group, starts its engine and watches it."""

import asyncio
import logging
import os
import time
from dataclasses import asdict
from typing import Any

from ray import serve

from deployments.router import STATS_KEY
from dspark_ray.core.config import AppConfig, for_replica
from dspark_ray.core.errors import DsparkError, EngineDeadError
from dspark_ray.core.types import EngineStats, Request, RequestOutput
from dspark_ray.runtime.engine_actor import EngineFactory
from dspark_ray.runtime.engine_client import EngineClient
from dspark_ray.runtime.logs import configure_logging
from dspark_ray.scheduling.autoscale import replica_demand
from dspark_ray.scheduling.load import ReplicaLoad

logger = logging.getLogger(__name__)

EXIT_DELAY_S = 0.2  # for the answers that tell the ingresses to go elsewhere


class LLMServer:
    """Carries admission and the end of each request; the tokens take the engine's own way."""

    async def __init__(self, config: AppConfig, factory: EngineFactory) -> None:  # type: ignore[misc]
        configure_logging()
        replica = serve.get_replica_context()
        logger.info("replica %s: starting its engine", replica.replica_id.unique_id)
        config = for_replica(config, replica.rank.rank)
        self._config = config
        self._last_stats: tuple[EngineStats | None, float] = (None, time.monotonic())
        self._engine = await EngineClient.start(
            config, replica.app_name, replica.replica_id.unique_id, factory, self._exit
        )
        info = self._engine.info
        logger.info("replica %s is ready, loaded in %.1f s", replica.replica_id.unique_id, info.load_s)
        for what, text in info.description.items():
            logger.info("  %s: %s", what, text)

    async def generate(self, request: Request) -> RequestOutput | DsparkError:
        """The final output. Errors that are answers come back as values: Serve logs raised ones as faults."""
        try:
            return await self._engine.generate(request)
        except DsparkError as error:
            return error

    async def record_routing_stats(self) -> dict[str, Any]:
        """Called by Serve every `serving.router_stats_period_s`, for the routers."""
        try:
            return {STATS_KEY: asdict(ReplicaLoad.of(await self._engine.stats()))}
        except EngineDeadError:
            return {}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve every `serving.autoscaling.stats_period_s`, for the autoscaling policy."""
        scaling, now_s = self._config.serving.autoscaling, time.monotonic()
        if scaling is None:
            return {}
        stats = await self._engine.stats()
        before, before_s = self._last_stats
        self._last_stats = (stats, now_s)
        return asdict(replica_demand(stats, before, now_s - before_s, scaling.target_tokens_per_s))

    async def check_health(self) -> None:
        """Called by Serve; raising replaces this replica."""
        await self._engine.check_health()

    async def __del__(self) -> None:
        if hasattr(self, "_engine"):
            await self._engine.close()

    def _exit(self, error: EngineDeadError) -> None:
        """Leaves at once: without an engine it looks idle to the router and would draw every request."""
        logger.error("%s; this replica ends and is replaced", error)
        asyncio.get_running_loop().call_later(EXIT_DELAY_S, os._exit, 1)
