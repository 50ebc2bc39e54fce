"""What the ingress knows of the engines of its application: asks them directly, without the scheduler."""

import asyncio
import contextlib
import logging
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

from dspark_ray.core.clock import Clock, SystemClock
from dspark_ray.core.errors import DsparkError, EngineDeadError
from dspark_ray.core.types import AdapterRef, EngineStats, SwapOrder, SwapState
from dspark_ray.observability.fleet_page import FleetCounters, fleet_page
from dspark_ray.runtime.names import NAMESPACE, engine_prefix, is_engine_name

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 2.0
LOADING_TIMEOUT_S = 120.0
FRESH_MS = 200.0  # answers are shared by all who ask within this time


class EngineFleet:
    """The engines found by name (`dspark_ray.serving.http.Fleet`). Belongs to one event loop."""

    def __init__(self, app_name: str, clock: Clock | None = None) -> None:
        self._app_name = app_name
        self._clock = clock or SystemClock()
        self._counters = FleetCounters()
        self._handles: dict[str, Any] = {}
        self._stats: list[EngineStats] = []
        self._asked_ms = -FRESH_MS
        self._asking = asyncio.Lock()
        self._finding: asyncio.Task[None] | None = None
        self._is_blind = False

    def last_stats(self) -> list[EngineStats]:
        """The newest answers, without asking; at most a watcher's period old."""
        return self._stats

    async def stats(self) -> list[EngineStats]:
        """Snapshots of the loaded engines that answer in time."""
        async with self._asking:
            if self._clock.now_ms() - self._asked_ms >= FRESH_MS:
                self._stats = await self._ask()
                self._asked_ms = self._clock.now_ms()
        return self._stats

    async def metrics_page(self) -> bytes:
        """The Prometheus page; counters of engines that died stay in the sums."""
        stats = await self.stats()
        return fleet_page(stats, self._counters.update(stats)).encode()

    async def load_adapter(self, adapter: AdapterRef) -> int:
        """How many engines have read it. Raises the error of one that cannot, or `EngineDeadError` for one
        that does not answer."""
        return len(await self._tell("load_adapter", adapter))

    async def load_drafter(self, order: SwapOrder) -> None:
        """Begins a trial on every engine, or on none; raises as `load_adapter` does."""
        try:
            await self._tell("load_drafter", order)
        except DsparkError:
            for handle in self._handles.values():
                handle.end_trial.remote(False, order)
            raise

    async def end_trial(self, promote: bool) -> None:
        await self._tell("end_trial", promote)

    async def swap_states(self) -> dict[str, SwapState]:
        """By replica."""
        answers = await self._tell("swap_state")
        return {name.removeprefix(engine_prefix(self._app_name)): state for name, state in answers.items()}

    async def _tell(self, method: str, *arguments: Any) -> dict[str, Any]:
        """What every engine answers, by name; raises an answer that is an error."""
        await self._refresh()
        handles = dict(self._handles)
        calls = [getattr(handle, method).remote(*arguments) for handle in handles.values()]
        try:
            answers = await asyncio.wait_for(asyncio.gather(*calls), LOADING_TIMEOUT_S)
        except (RayError, TimeoutError) as error:
            raise EngineDeadError(f"a replica did not answer to {method}: try again") from error
        for answer in answers:
            if isinstance(answer, DsparkError):
                raise answer
        return dict(zip(handles, answers, strict=True))

    async def unload_adapter(self, adapter: AdapterRef) -> None:
        """Frees what engines hold of it; one that does not hear it evicts it as the least used."""
        for handle in self._handles.values():
            handle.unload_adapter.remote(adapter)

    async def watch(self, period_s: float) -> None:
        """Asks now and then, forever: what an engine counted must be known before it dies."""
        while True:
            try:
                self._counters.update(await self.stats())
            except Exception:  # of whatever kind: a watcher that ended would be missed by nobody
                logger.exception("cannot watch the engines")
            await asyncio.sleep(period_s)

    async def _ask(self) -> list[EngineStats]:
        try:
            await self._refresh()
            self._is_blind = False
        except Exception as error:  # the cluster's directory is down; those known may still answer
            if not self._is_blind:
                logger.warning("cannot list engines: %r", error)
            self._is_blind = True
        answers = await asyncio.gather(*(self._ask_one(handle) for handle in self._handles.values()))
        return [stats for stats in answers if stats is not None]

    async def _refresh(self) -> None:
        """`_find` with a time limit; never twice at once, since each holds a thread while it hangs."""
        if self._finding is None or self._finding.done():
            self._finding = asyncio.create_task(self._find())
        done, _ = await asyncio.wait([self._finding], timeout=ANSWER_TIMEOUT_S)
        if not done:
            raise TimeoutError(f"no answer within {ANSWER_TIMEOUT_S:g} s")
        self._finding.result()

    async def _find(self) -> None:
        """Handles of the engines that exist now."""
        listed = await asyncio.to_thread(list_named_actors, all_namespaces=True)
        names = {
            entry["name"]
            for entry in listed
            if entry["namespace"] == NAMESPACE and is_engine_name(self._app_name, entry["name"])
        }
        self._handles = {name: handle for name, handle in self._handles.items() if name in names}
        for name in names - self._handles.keys():
            with contextlib.suppress(ValueError):  # it died between the two calls
                self._handles[name] = await asyncio.to_thread(ray.get_actor, name, namespace=NAMESPACE)

    async def _ask_one(self, handle: Any) -> EngineStats | None:
        try:
            return await asyncio.wait_for(handle.stats.remote(), ANSWER_TIMEOUT_S)
        except Exception:  # dead, frozen, or of a cluster that is gone: it has nothing to say
            return None
