"""An engine as its server sees it: started, watched, asked and closed. The server knows no engine by name."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import ray
import zmq
from ray.exceptions import RayError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dspark_ray.core.config import AppConfig
from dspark_ray.core.errors import EngineDeadError
from dspark_ray.core.types import EngineStats, FinishReason, Request, RequestOutput, SamplingParams
from dspark_ray.runtime.engine_actor import CONCURRENCY_GROUPS, EngineActor, EngineFactory, EngineInfo
from dspark_ray.runtime.engine_link import EngineLink
from dspark_ray.runtime.names import NAMESPACE, engine_name
from dspark_ray.runtime.placement import replica_placement
from dspark_ray.runtime.transport import bind_inbox

logger = logging.getLogger(__name__)

CANARY_TOKENS = 16
CANARY_TIMEOUT_S = 120.0
STUCK_MS = 120_000.0  # a loop that has not turned for so long hangs in a step
CONTROL_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 2.0


class EngineClient:
    """Made by `start`; everything belongs to the event loop it was started in."""

    def __init__(self, actor: Any, info: EngineInfo, link: EngineLink) -> None:
        self._actor = actor
        self.info = info
        self._link = link
        self._dead: EngineDeadError | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._on_death: Callable[[EngineDeadError], None] | None = None

    @classmethod
    async def start(
        cls,
        config: AppConfig,
        app_name: str,
        replica_id: str,
        factory: EngineFactory,
        on_death: Callable[[EngineDeadError], None],
    ) -> "EngineClient":
        """A running engine that has passed its canary generation. May take minutes.

        Raises what the factory raises, or `EngineDeadError`. `on_death` is called once, if the engine dies
        before `close`.
        """
        actor = _start_actor(config, app_name, replica_id, factory)
        try:
            info = await actor.load.remote()
        except BaseException:
            ray.kill(actor)
            raise
        context = zmq.Context()
        inbox = bind_inbox(context, ray.util.get_node_ip_address())
        link = EngineLink(context, inbox, info.inbox_address, info.generation)
        link.start()
        client = cls(actor, info, link)
        client._on_death = on_death
        client._watcher = asyncio.get_running_loop().create_task(client._watch(actor.run.remote()))
        try:
            await client._pass_canary(config)
        except BaseException:
            await client.close()
            raise
        await actor.mark_ready.remote()
        return client

    async def generate(self, request: Request) -> RequestOutput:
        """The final output; tokens go to `request.reply_address`. Cancelling it aborts the request.

        Raises `RequestError`, `QueueFullError` or `EngineDeadError`.
        """
        return await self._link.generate(request)

    def abort(self, request_id: str) -> None:
        """Ends a request early; unknown ids are no error."""
        self._link.abort(request_id)

    async def stats(self) -> EngineStats:
        """The newest snapshot, at most a fraction of a second old. Raises `EngineDeadError`."""
        return await self._control(self._actor.stats.remote())

    async def check_health(self) -> None:
        """Raises `EngineDeadError` when the engine is dead, or its loop hangs."""
        age_ms = await self._control(self._actor.turn_age_ms.remote())
        if age_ms > STUCK_MS:
            raise EngineDeadError(f"the engine's loop has not turned for {age_ms / 1e3:.0f} s")

    async def close(self) -> None:
        """Stops the loop, then ends the process; what still runs fails with `EngineDeadError`."""
        self._on_death = None
        self._link.stop()
        if self._watcher is not None:
            await asyncio.wait([self._watcher], timeout=STOP_TIMEOUT_S)
            self._watcher.cancel()
        await self._link.close()
        ray.kill(self._actor)

    async def _control(self, reference: Any) -> Any:
        if self._dead is not None:
            raise self._dead
        try:
            return await asyncio.wait_for(reference, CONTROL_TIMEOUT_S)
        except TimeoutError as error:
            raise EngineDeadError(f"the engine did not answer for {CONTROL_TIMEOUT_S:g} s") from error
        except RayError as error:
            raise EngineDeadError(f"the engine's process is gone: {_first_line(error)}") from error

    async def _watch(self, run: Any) -> None:
        """Waits for the end of the loop: a killed process shows here within milliseconds."""
        try:
            await run
            reason = "its loop ended"
        except RayError as error:
            reason = _first_line(error)
        self._dead = EngineDeadError(f"the engine died: {reason}")
        self._link.fail(self._dead)
        if self._on_death is not None:
            self._on_death(self._dead)

    async def _pass_canary(self, config: AppConfig) -> None:
        """One short generation through the whole path to the engine, before any client's."""
        num_tokens = min(CANARY_TOKENS, config.model.max_model_len - len(self.info.canary_prompt))
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        request = Request("canary", self.info.canary_prompt, sampling)
        try:
            async with asyncio.timeout(CANARY_TIMEOUT_S):
                output = await self.generate(request)
        except TimeoutError as error:
            message = f"the canary generation took longer than {CANARY_TIMEOUT_S:g} s"
            raise EngineDeadError(message) from error
        usage = output.usage
        if output.finish_reason is not FinishReason.LENGTH or usage is None:
            raise EngineDeadError(f"the canary generation failed: {output}")
        if config.speculation.drafter.kind != "none" and config.speculation.mode != "off":
            log = logger.info if usage.drafted_tokens else logger.warning
            log(
                "canary: %d tokens, drafted %d, verified %d, accepted %d",
                usage.completion_tokens,
                usage.drafted_tokens,
                usage.verified_tokens,
                usage.accepted_tokens,
            )


def _start_actor(config: AppConfig, app_name: str, replica_id: str, factory: EngineFactory) -> Any:
    """The named engine actor, in this replica's placement group if it has one."""
    decorate: Any = ray.remote  # its type hints do not know concurrency groups
    actor_class = decorate(concurrency_groups=CONCURRENCY_GROUPS)(EngineActor)
    group, placement = get_current_placement_group(), replica_placement(config)
    strategy = None
    if group is not None:
        strategy = PlacementGroupSchedulingStrategy(
            group,
            placement_group_bundle_index=0,
            placement_group_capture_child_tasks=placement.captures_children,
        )
    return actor_class.options(
        name=engine_name(app_name, replica_id),
        namespace=NAMESPACE,
        num_cpus=config.serving.replica_cpus,
        max_restarts=0,
        scheduling_strategy=strategy,
        **placement.actor_options,
    ).remote(config, app_name, replica_id, factory)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
