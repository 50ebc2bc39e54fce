"""vLLM's asynchronous engine as a step engine: `step()` waits for what its core has emitted.

`AsyncLLM` belongs to an event loop, which runs on a thread of its own; the methods of `VllmEngine` are
called by the engine loop's thread, as those of the native engine are. vLLM's core steps in another process
at its own pace: nothing here is on its critical path.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from dspark_ray.core.clock import Clock, SystemClock
from dspark_ray.core.config import AppConfig
from dspark_ray.core.errors import DsparkError, EngineDeadError, QueueFullError, RequestError
from dspark_ray.core.types import (
    AdapterRef,
    EngineStats,
    Request,
    RequestOutput,
    RequestUsage,
    StepPlan,
    SurvivalReport,
)
from dspark_ray.scheduling.load import Rates, request_counts, throughput_curve
from dspark_ray.scheduling.newest_plan import NewestPlan
from dspark_ray.scheduling.step_table import StepTable
from dspark_ray.vllm_engine.counters import VllmCounters
from dspark_ray.vllm_engine.link import CoreReport, PlanLink
from dspark_ray.vllm_engine.outputs import OutputReader

logger = logging.getLogger(__name__)

STEP_WAIT_S = 0.002  # new requests and aborts wait so long for a step that emits nothing
ADMIT_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 10.0

T = TypeVar("T")


class VllmClient(Protocol):
    """What is used of `AsyncLLM`, and of the module around it; every call comes from the event loop."""

    async def add(self, request: Request) -> Any:
        """Admits a request; a collector whose `get()` gives its outputs. Raises vLLM's own errors."""
        ...

    async def abort(self, collector: Any) -> None: ...

    async def load_adapter(self, ref: AdapterRef) -> Any:
        """Raises `RequestError` for one that cannot be served."""
        ...

    def as_error(self, error: Exception) -> DsparkError | None:
        """vLLM's error as ours: `RequestError`, `QueueFullError`, `EngineDeadError`; None for any other."""
        ...

    @property
    def errored(self) -> bool:
        """Whether the engine core is dead. Safe from any thread."""
        ...

    @property
    def num_kv_blocks(self) -> int: ...

    def shutdown(self) -> None: ...


@dataclass(slots=True)
class _Running:
    """A request inside vLLM."""

    request: Request
    collector: Any
    outputs: OutputReader
    num_emitted: int = 0  # tokens of this attempt that `step` has given out
    reader: "asyncio.Task[None] | None" = None


class VllmEngine:
    """`dspark_ray.runtime.engine_loop.StepEngine` over vLLM."""

    def __init__(
        self,
        config: AppConfig,
        connect: Callable[[VllmCounters], Coroutine[Any, Any, VllmClient]],
        description: dict[str, Any],
        *,
        engine_id: str = "engine",
        clock: Clock | None = None,
        link: PlanLink | None = None,
    ) -> None:
        """`connect` makes the client, in the event loop it will live in. Blocks until the model is loaded.

        link: to vLLM's scheduler, where it verifies adaptively; the engine closes it.
        """
        self.config = config
        self._engine_id = engine_id
        self._clock = clock or SystemClock()
        self._description = description
        self._counters = VllmCounters(config.speculation.num_draft_tokens, self._clock)
        self._running: dict[str, _Running] = {}
        self._outputs: list[RequestOutput] = []  # of this turn of the event loop
        self._batches: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
        self._num_finished = self._num_aborted = 0
        self._plan = NewestPlan()
        self._link = link
        self._core_report: CoreReport | None = None
        self._rates: Rates = ()  # by it
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dspark-vllm", daemon=True)
        self._thread.start()
        try:
            self._client: VllmClient = self._wait_for(connect(self._counters), None)
        except BaseException:
            self._leave()
            raise

    # -- the engine loop's thread --------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Hands a request to vLLM. `RequestError` if it can never run, `QueueFullError` if too many wait,
        `EngineDeadError` if its core has just died: the loop ends, and the request runs elsewhere."""
        assert request.request_id not in self._running, f"request id {request.request_id!r} is in use"
        self._check_room(request)
        try:
            running = self._wait_for(self._admit(request), ADMIT_TIMEOUT_S)
        except DsparkError:
            raise
        except Exception as error:
            known = self._client.as_error(error)
            if known is not None:
                raise known from error
            raise RequestError(
                f"the engine failed on this request: {error}", status=500, code="engine_error"
            ) from error
        self._running[request.request_id] = running

    def abort(self, request_id: str) -> bool:
        running = self._running.pop(request_id, None)
        if running is None:
            return False
        asyncio.run_coroutine_threadsafe(self._drop(running), self._loop)
        self._num_aborted += 1
        return True

    def usage(self, request_id: str) -> RequestUsage | None:
        """Without drafts: vLLM tells a request's own only when it has finished."""
        running = self._running.get(request_id)
        return None if running is None else running.outputs.usage(running.num_emitted)

    def take_shed(self) -> list[tuple[str, QueueFullError]]:
        """None: vLLM keeps what it has taken."""
        return []

    def has_work(self) -> bool:
        return bool(self._running) or self._client.errored

    def step(self) -> list[RequestOutput]:
        """What vLLM emits next, or nothing if that takes long. `EngineDeadError` once its core is dead."""
        if self._client.errored:
            raise EngineDeadError("vLLM's engine core is dead; its own log says why")
        try:
            outputs = self._batches.get(timeout=STEP_WAIT_S)
        except queue.Empty:
            return []
        return [output for output in outputs if self._take(output)]

    def stats(self) -> EngineStats:
        load, recent = self._counters.load(), self._counters.recent.summary()
        num_blocks = self._client.num_kv_blocks
        return EngineStats(
            engine_id=self._engine_id,
            counters=self._counters.counters(),
            num_running=load.num_running,
            num_waiting=max(load.num_waiting, len(self._running) - load.num_running),
            kv_used_blocks=round(load.kv_usage * num_blocks),
            kv_total_blocks=num_blocks,
            prefix_hit_tokens=self._counters.prefix_hit_tokens,
            prefix_query_tokens=self._counters.prefix_query_tokens,
            num_preemptions=self._counters.num_preemptions,
            num_finished=self._num_finished,
            num_aborted=self._num_aborted,
            budget_tokens=recent.budget_tokens,
            step_measured_ms=recent.measured_ms,
            plan_age_ms=self._plan.age_ms(self._clock.now_ms()),
            max_running=self.config.engine.max_running,
            kv_block_size=self.config.engine.kv_block_size,
            rates=self._rates,
        )

    def make_report(
        self, replica_id: str, generation: int, sequence: int, include_table: bool
    ) -> SurvivalReport:
        """The load, and with adaptive verification the confidences and step costs that vLLM's core tells."""
        load, core = self._counters.load(), self._newest_core_report()
        none = np.zeros((0, self.config.speculation.num_draft_tokens), dtype=np.float32)
        decodes = core is not None and load.num_running > 0
        return SurvivalReport(
            replica_id=replica_id,
            generation=generation,
            sequence=sequence,
            survival=core.survival if core is not None and decodes else none,
            base_rows=core.base_rows if core is not None and decodes else load.num_running,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            table_digest="" if core is None else core.table_digest,
            table=core.table if core is not None and include_table else None,
            budget_tokens=self._counters.recent.summary().budget_tokens,
        )

    def apply_plan(self, plan: StepPlan) -> None:
        if self._plan.offer(plan, self._clock.now_ms()) and self._link is not None:
            self._link.send(plan)

    def describe(self) -> dict[str, Any]:
        tokens = self._client.num_kv_blocks * self.config.engine.kv_block_size
        return self._description | {"kv": f"{self._client.num_kv_blocks} blocks ({tokens} tokens)"}

    def load(self, ref: AdapterRef) -> None:
        """Reads a LoRA adapter; from any thread. Raises `RequestError` if it cannot be served."""
        try:
            self._wait_for(self._client.load_adapter(ref), ADMIT_TIMEOUT_S)
        except DsparkError:
            raise
        except Exception as error:
            raise self._client.as_error(error) or RequestError(str(error), code="invalid_adapter") from error

    def forget(self, digest: str) -> None:
        """Nothing to do: vLLM evicts the least used."""

    def close(self) -> None:
        """Ends vLLM's processes. What runs is lost."""
        try:
            self._wait_for(self._end(), CLOSE_TIMEOUT_S)
        finally:
            self._leave()

    def _check_room(self, request: Request) -> None:
        """What vLLM would find out later, or call by other names."""
        longest = self.config.model.max_model_len
        sampling = request.sampling
        if len(request.emitted_token_ids) >= sampling.max_tokens:
            raise RequestError("max_tokens leaves nothing to generate", param="max_tokens")
        if len(request.prompt_token_ids) + sampling.max_tokens > longest:
            raise RequestError(
                f"the prompt has {len(request.prompt_token_ids)} tokens and max_tokens is "
                f"{sampling.max_tokens}; together they exceed the model's {longest}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        most = self.config.engine.max_running + self.config.engine.max_waiting
        if len(self._running) >= most:
            raise QueueFullError(f"{len(self._running)} requests run or wait; try again later")

    def _take(self, output: RequestOutput) -> bool:
        """Books an output; False for one of a request that was aborted meanwhile."""
        running = self._running.get(output.request_id)
        if running is None:
            return False
        running.num_emitted += len(output.token_ids)
        if output.finish_reason is not None:
            del self._running[output.request_id]
            self._num_finished += 1
        return True

    def _newest_core_report(self) -> CoreReport | None:
        if self._link is not None and (report := self._link.newest_report()) is not None:
            self._core_report = report
            if len(report.survival):
                table = StepTable.from_dict(report.table)
                counts = request_counts(self.config.engine.max_running)
                self._rates = throughput_curve(report.survival.mean(axis=0), table, None, counts)
        return self._core_report

    def _wait_for(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def _leave(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._link is not None:
            self._link.close()

    # -- the event loop's thread ---------------------------------------------------------------------

    async def _admit(self, request: Request) -> _Running:
        running = _Running(request, await self._client.add(request), OutputReader(request))
        running.reader = asyncio.create_task(self._read(running))
        return running

    async def _end(self) -> None:
        readers = [running.reader for running in self._running.values() if running.reader is not None]
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        self._client.shutdown()

    async def _drop(self, running: _Running) -> None:
        if running.reader is not None:
            running.reader.cancel()
        await self._client.abort(running.collector)

    async def _read(self, running: _Running) -> None:
        """Passes on one request's outputs until it ends; a dead core ends the engine, not the request."""
        while True:
            try:
                output = await running.collector.get()
            except Exception as error:
                if self._client.errored:
                    return  # `step` raises
                logger.exception("vLLM failed on %s", running.request.request_id)
                self._emit(running.outputs.failed(error))
                return
            read = running.outputs.read(output)
            self._emit(read)
            if read.finish_reason is not None:
                return

    def _emit(self, output: RequestOutput) -> None:
        """Outputs of one step wake their readers in one turn of the event loop: they leave together."""
        if not self._outputs:
            self._loop.call_soon(self._flush)
        self._outputs.append(output)

    def _flush(self) -> None:
        self._batches.put(self._outputs)
        self._outputs = []
