"""An engine as its server sees it: started, watched, asked and closed. The server knows no engine by name."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import zmq
from ray.exceptions import ActorDiedError, RayError
from ray.util.placement_group import PlacementGroup, get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dspark_ray.core.config import AppConfig
from dspark_ray.core.errors import EngineDeadError
from dspark_ray.core.types import EngineStats, FinishReason, Request, RequestOutput, SamplingParams
from dspark_ray.runtime.engine_actor import CONCURRENCY_GROUPS, EngineActor, EngineFactory, EngineInfo
from dspark_ray.runtime.engine_link import EngineLink
from dspark_ray.runtime.names import NAMESPACE, engine_name, rank_name
from dspark_ray.runtime.placement import Placement, replica_placement
from dspark_ray.runtime.rank_actor import RANK_CONCURRENCY_GROUPS, RankActor
from dspark_ray.runtime.transport import bind_inbox

logger = logging.getLogger(__name__)

CANARY_TOKENS = 16
CANARY_TIMEOUT_S = 120.0
STUCK_MS = 120_000.0  # a loop that has not turned for so long hangs in a step
CONTROL_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 2.0
GRACE_S = 0.5  # for the rank that died to be known, when another one has failed because of it


class EngineClient:
    """Made by `start`; everything belongs to the event loop it was started in."""

    def __init__(self, actor: Any, ranks: Sequence[Any], info: EngineInfo, link: EngineLink) -> None:
        self._actor, self._ranks = actor, ranks
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
        """A running engine that has passed its canary generation, with the ranks that follow it. May take
        minutes.

        Raises what the factory raises, or `EngineDeadError`. `on_death` is called once, if the engine dies
        before `close`.
        """
        placement = replica_placement(config)
        actor = _start_actor(config, app_name, replica_id, factory, placement)
        ranks = _start_ranks(config, app_name, replica_id, placement)
        try:
            info, runs = await _load(actor, ranks)
        except BaseException:
            _kill(actor, *ranks)
            raise
        context = zmq.Context()
        inbox = bind_inbox(context, ray.util.get_node_ip_address())
        link = EngineLink(context, inbox, info.inbox_address, info.generation)
        link.start()
        client = cls(actor, ranks, info, link)
        client._on_death = on_death
        runs["the engine"] = actor.run.remote()
        client._watcher = asyncio.get_running_loop().create_task(client._watch(runs))
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
        _kill(self._actor, *self._ranks)

    async def _control(self, reference: Any) -> Any:
        if self._dead is not None:
            raise self._dead
        try:
            return await asyncio.wait_for(reference, CONTROL_TIMEOUT_S)
        except TimeoutError as error:
            raise EngineDeadError(f"the engine did not answer for {CONTROL_TIMEOUT_S:g} s") from error
        except RayError as error:
            raise EngineDeadError(f"the engine's process is gone: {_first_line(error)}") from error

    async def _watch(self, runs: Mapping[str, Any]) -> None:
        """Waits for the end of a loop, the engine's or another rank's: a killed process shows here within
        milliseconds."""
        loops = {asyncio.ensure_future(_result(run)): name for name, run in runs.items()}
        _, others = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
        if others:  # the first to be heard of need not be the first that fell
            self._dead = EngineDeadError("one of its ranks has ended")
            await asyncio.wait(others, timeout=GRACE_S)
        ends = [_End(loops[loop], loop.result()) for loop in loops if loop.done()]
        reasons = "; ".join(map(str, sorted(ends, key=lambda end: not end.has_died)))
        self._dead = EngineDeadError(f"the engine died: {reasons}")
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


@dataclass(frozen=True, slots=True)
class _End:
    """How a loop ended."""

    name: str
    error: RayError | None

    @property
    def has_died(self) -> bool:
        """Its process, and nobody else's."""
        return isinstance(self.error, ActorDiedError)

    def __str__(self) -> str:
        return f"{self.name}: {'its loop ended' if self.error is None else _first_line(self.error)}"


async def _result(run: Any) -> RayError | None:
    try:
        await run
    except RayError as error:
        return error
    return None


async def _load(actor: Any, ranks: Sequence[Any]) -> tuple[EngineInfo, dict[str, Any]]:
    """All ranks at once: none is ready before the others are. Raises what the first to fail raises.

    Returns the `run()` of each rank, too: they follow from here on, since rank 0 measures its steps, and
    perhaps its drafter, before it is loaded.
    """
    if not ranks:
        return await actor.load.remote(), {}
    places = await asyncio.gather(*(rank.open.remote() for rank in ranks))
    link = await actor.open_ranks.remote(places)
    loads = [actor.load.remote(), *(rank.load.remote(link) for rank in ranks)]
    runs = {f"rank {number}": rank.run.remote() for number, rank in enumerate(ranks, start=1)}
    info, *_ = await asyncio.gather(*loads)
    return info, runs


def _start_actor(
    config: AppConfig, app_name: str, replica_id: str, factory: EngineFactory, placement: Placement
) -> Any:
    """The named engine actor, in this replica's placement group if it has one."""
    decorate: Any = ray.remote  # its type hints do not know concurrency groups
    actor_class = decorate(concurrency_groups=CONCURRENCY_GROUPS)(EngineActor)
    return actor_class.options(
        name=engine_name(app_name, replica_id),
        namespace=NAMESPACE,
        num_cpus=config.serving.replica_cpus,
        max_restarts=0,
        scheduling_strategy=_bundle(0, placement),
        **placement.actor_options,
    ).remote(config, app_name, replica_id, factory)


def _start_ranks(config: AppConfig, app_name: str, replica_id: str, placement: Placement) -> list[Any]:
    """The named actors that follow it, each in its own bundle. They end with this process, their owner."""
    decorate: Any = ray.remote
    actor_class = decorate(concurrency_groups=RANK_CONCURRENCY_GROUPS)(RankActor)
    return [
        actor_class.options(
            name=rank_name(app_name, replica_id, rank),
            namespace=NAMESPACE,
            num_cpus=config.serving.replica_cpus,
            max_restarts=0,
            scheduling_strategy=_bundle(rank, placement),
            **placement.actor_options,
        ).remote(config, rank)
        for rank in range(1, placement.num_ranks)
    ]


def _bundle(index: int, placement: Placement) -> PlacementGroupSchedulingStrategy | None:
    """One of this replica's placement group; None without a group."""
    group: PlacementGroup | None = get_current_placement_group()
    if group is None:
        return None
    return PlacementGroupSchedulingStrategy(
        group,
        placement_group_bundle_index=index,
        placement_group_capture_child_tasks=placement.captures_children,
    )


def _kill(*actors: Any) -> None:
    for actor in actors:
        ray.kill(actor)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
