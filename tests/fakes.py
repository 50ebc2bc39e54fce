"""Stand-ins that keep the contracts of the real things without a model.

`FakeEngine` echoes the prompt, several tokens a step, with counters, a step table and plans; its text is
known in advance, so that a lost or doubled token shows.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dspark_ray.core.clock import Clock, SystemClock
from dspark_ray.core.config import AppConfig
from dspark_ray.core.errors import DsparkError, EngineDeadError, QueueFullError, RequestError
from dspark_ray.core.types import (
    AdapterRef,
    ArmStats,
    EngineStats,
    FinishReason,
    Request,
    RequestOutput,
    RequestUsage,
    SpeculationCounters,
    StepDetails,
    StepPlan,
    SurvivalReport,
    SwapOrder,
    SwapState,
    TokenLogprobs,
)
from dspark_ray.scheduling.step_table import StepTable

TOKENS_PER_STEP = 3
TURN_TOKENS = (1, 2)  # <|im_start|> and <|im_end|> of the tests' tokenizer
POISON_TOKEN = 0  # a prompt that begins with it breaks the step it is in


def echo(prompt: tuple[int, ...], position: int) -> int:
    """The output token at `position`: the prompt over and over, without the tokens that end a turn."""
    spoken = [token for token in prompt if token not in TURN_TOKENS] or prompt
    return spoken[position % len(spoken)]


@dataclass
class _Running:
    request: Request
    output: list[int]
    num_cached: int
    usage: RequestUsage = field(default_factory=RequestUsage)


Say = Callable[[Request, int], int]
"""(request, position) → the output token there."""


class FakeEngine:
    """The engine's contract with a fixed step time and acceptance: 2 of 7 drafted tokens."""

    def __init__(
        self,
        config: AppConfig,
        engine_id: str = "fake",
        *,
        step_ms: float = 5.0,
        clock: Clock | None = None,
        say: Say | None = None,
    ) -> None:
        """`say`: what it answers, other than the prompt over and over."""
        self._say = say or (lambda request, position: echo(request.prompt_token_ids, position))
        self._config = config
        self._engine_id = engine_id
        self._step_ms = step_ms
        self._clock = clock or SystemClock()
        self._requests: dict[str, _Running] = {}
        self._gamma = config.speculation.num_draft_tokens
        self._counters = SpeculationCounters(self._gamma)
        self._table = StepTable(np.array([1, 64, 512]), np.array([1.0, 2.0, 16.0]) * max(step_ms, 1e-3))
        self._plan: StepPlan | None = None
        self._plan_at_ms = 0.0
        self._budget = 0.0
        self._num_finished = self._num_aborted = 0

    def add_request(self, request: Request) -> None:
        if len(request.prompt_token_ids) + request.sampling.max_tokens > self._config.model.max_model_len:
            raise RequestError("too long for the fake", param="max_tokens", code="context_length_exceeded")
        if len(self._requests) >= self._config.engine.max_running + self._config.engine.max_waiting:
            raise QueueFullError("the fake's queue is full")
        self._requests[request.request_id] = _Running(request, list(request.emitted_token_ids), 0)

    def abort(self, request_id: str) -> bool:
        self._num_aborted += request_id in self._requests
        return self._requests.pop(request_id, None) is not None

    def usage(self, request_id: str) -> RequestUsage | None:
        running = self._requests.get(request_id)
        return None if running is None else self._usage(running)

    def take_shed(self) -> list[tuple[str, QueueFullError]]:
        return []

    def has_work(self) -> bool:
        return bool(self._requests)

    def step(self) -> list[RequestOutput]:
        time.sleep(self._step_ms / 1e3)
        running = list(self._requests.values())[: self._config.engine.max_running]
        self._budget = float(min(len(running) * self._gamma, self._allowed()))
        self._counters.target_steps += 1
        return [self._advance(one) for one in running]

    def stats(self) -> EngineStats:
        return EngineStats(
            engine_id=self._engine_id,
            counters=replace(
                self._counters,
                verified_per_position=list(self._counters.verified_per_position),
                accepted_per_position=list(self._counters.accepted_per_position),
            ),
            num_running=min(len(self._requests), self._config.engine.max_running),
            num_waiting=max(0, len(self._requests) - self._config.engine.max_running),
            kv_used_blocks=len(self._requests),
            kv_total_blocks=self._config.engine.kv_num_blocks,
            num_finished=self._num_finished,
            num_aborted=self._num_aborted,
            budget_tokens=self._budget,
            step_predicted_ms=self._step_ms,
            step_measured_ms=self._step_ms,
            plan_age_ms=self._plan_age_ms(),
        )

    def make_report(
        self, replica_id: str, generation: int, sequence: int, include_table: bool
    ) -> SurvivalReport:
        num_running = min(len(self._requests), self._config.engine.max_running)
        survival = np.tile(0.8 ** np.arange(1, self._gamma + 1, dtype=np.float32), (num_running, 1))
        return SurvivalReport(
            replica_id=replica_id,
            generation=generation,
            sequence=sequence,
            survival=survival,
            base_rows=num_running,
            num_running=num_running,
            num_waiting=0,
            table_digest=self._table.digest,
            table=self._table.to_dict() if include_table else None,
            budget_tokens=self._budget,
        )

    def apply_plan(self, plan: StepPlan) -> None:
        self._plan, self._plan_at_ms = plan, self._clock.now_ms()

    def describe(self) -> dict[str, Any]:
        return {"target": "a fake that echoes its prompt"}

    def _allowed(self) -> float:
        """Draft tokens a step that the live plan allows."""
        if self._plan is None or self._plan_age_ms() is None or self._plan.draft_tokens_per_s is None:
            return float("inf")
        return self._plan.draft_tokens_per_s * self._step_ms / 1e3

    def _plan_age_ms(self) -> float | None:
        if self._plan is None:
            return None
        age_ms = self._clock.now_ms() - self._plan_at_ms
        return age_ms if age_ms <= self._plan.ttl_ms else None

    def _advance(self, running: _Running) -> RequestOutput:
        request = running.request
        if request.prompt_token_ids[0] == POISON_TOKEN:
            raise RuntimeError("a poisoned prompt")
        tokens, reason = [], None
        for _ in range(TOKENS_PER_STEP):
            tokens.append(self._say(request, len(running.output)))
            running.output.append(tokens[-1])
            if tokens[-1] in request.sampling.stop_token_ids:
                reason = FinishReason.STOP
            elif len(running.output) >= request.sampling.max_tokens:
                reason = FinishReason.LENGTH
            if reason is not None:
                break
        self._count(running, len(tokens))
        output = self._with_logprobs(request, tokens, is_first=len(running.output) == len(tokens))
        if request.speculation_details:
            scores = tuple(round(0.8**k, 4) for k in range(1, self._gamma + 1))
            output = replace(output, details=StepDetails(self._gamma, self._gamma, len(tokens) - 1, scores))
        if reason is None:
            return output
        del self._requests[request.request_id]
        self._num_finished += 1
        return replace(output, finish_reason=reason, usage=self._usage(running))

    def _with_logprobs(self, request: Request, tokens: list[int], *, is_first: bool) -> RequestOutput:
        """A token's log-probability is its id, negative; the likeliest ones are tokens 5, 6, 7, ..."""
        sampling, prompt = request.sampling, request.prompt_token_ids[1:] if is_first else ()

        def told(token_ids: Sequence[int], num_top: int | None) -> tuple[TokenLogprobs, ...]:
            top = tuple((5 + rank, -float(rank)) for rank in range(num_top or 0))
            return () if num_top is None else tuple(TokenLogprobs(-float(t), top) for t in token_ids)

        return RequestOutput(
            request.request_id,
            tuple(tokens),
            logprobs=told(tokens, sampling.logprobs),
            prompt_logprobs=told(prompt, sampling.prompt_logprobs),
        )

    def _count(self, running: _Running, num_tokens: int) -> None:
        counters, accepted = self._counters, num_tokens - 1
        counters.drafts += 1
        counters.drafted_tokens += self._gamma
        counters.verified_tokens += self._gamma
        counters.accepted_tokens += accepted
        counters.rejected_tokens += self._gamma - accepted
        counters.emitted_tokens += num_tokens
        counters.decode_tokens += num_tokens
        counters.request_steps += 1
        for position in range(self._gamma):
            counters.verified_per_position[position] += 1
            counters.accepted_per_position[position] += position < accepted
        used = running.usage
        running.usage = replace(
            used,
            drafted_tokens=used.drafted_tokens + self._gamma,
            verified_tokens=used.verified_tokens + self._gamma,
            accepted_tokens=used.accepted_tokens + accepted,
        )

    def _usage(self, running: _Running) -> RequestUsage:
        return replace(
            running.usage,
            prompt_tokens=len(running.request.prompt_token_ids),
            cached_tokens=running.num_cached,
            completion_tokens=len(running.output),
        )


class LocalServer:
    """Backend and streams of one process around a `FakeEngine`: what ingress, server and zmq are otherwise.

    `deaths` lists after how many of its steps the engine dies, once each; its requests are then lost.
    """

    address = "local"

    def __init__(self, engine: FakeEngine, deaths: Sequence[int] = ()) -> None:
        self.engine = engine
        self.submitted: list[Request] = []
        self._deaths = list(deaths)
        self._num_steps = 0
        self._streams: dict[str, asyncio.Queue[RequestOutput | DsparkError | None]] = {}
        self._ends: dict[str, asyncio.Future[RequestOutput]] = {}
        self._pump: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Nothing is left behind, in the engine or here."""
        return not (self._streams or self._ends or self.engine.has_work())

    async def submit(self, request: Request) -> RequestOutput:
        self.submitted.append(request)
        self.engine.add_request(request)
        end = self._ends[request.request_id] = asyncio.get_running_loop().create_future()
        self._tell_shed()
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        try:
            return await end
        finally:
            self._ends.pop(request.request_id, None)
            self.engine.abort(request.request_id)

    def open(self, request_id: str) -> asyncio.Queue[RequestOutput | DsparkError | None]:
        self._streams[request_id] = asyncio.Queue()
        return self._streams[request_id]

    def discard(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    def abort(self, request_id: str) -> None:
        usage = self.engine.usage(request_id)
        if self.engine.abort(request_id):
            self._deliver(RequestOutput(request_id, (), FinishReason.ABORT, usage))

    async def _run(self) -> None:
        while self.engine.has_work():
            await asyncio.sleep(0)
            self._num_steps += 1
            if self._num_steps in self._deaths:
                self._die()
                continue
            try:
                outputs = self.engine.step()
            except RuntimeError as error:
                outputs = [
                    RequestOutput(request_id, (), FinishReason.ERROR, error=str(error), step_failed=True)
                    for request_id in list(self._ends)
                ]
            for output in outputs:
                self._deliver(output)
            self._tell_shed()

    def _tell_shed(self) -> None:
        for request_id, error in self.engine.take_shed():
            if request_id in self._ends and not self._ends[request_id].done():
                self._ends[request_id].set_exception(error)

    def _deliver(self, output: RequestOutput) -> None:
        if output.request_id in self._streams:
            self._streams[output.request_id].put_nowait(output)
        if output.finish_reason is not None and output.request_id in self._ends:
            self.engine.abort(output.request_id)
            if self._ends[output.request_id].done():
                return  # its client left in this very step
            self._ends[output.request_id].set_result(replace(output, token_ids=()))

    def _die(self) -> None:
        for request_id, end in list(self._ends.items()):
            self.engine.abort(request_id)
            end.set_exception(EngineDeadError("the fake died"))


class OneEngineFleet:
    """What `build_api` asks about replicas, for one engine or none in this process."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.hangs = False
        self.adapters: list[AdapterRef] = []
        self.adapter_error: DsparkError | None = None
        self.swap_state = SwapState("none")

    async def stats(self) -> list[EngineStats]:
        if self.hangs:
            await asyncio.Event().wait()
        return self.last_stats()

    def last_stats(self) -> list[EngineStats]:
        return [] if self.engine is None else [replace(self.engine.stats(), ready=True)]

    async def metrics_page(self) -> bytes:
        return b"dspark_drafts_total 1.0\n"

    async def load_drafter(self, order: SwapOrder) -> None:
        self.swap_state = SwapState("trial", order, arms=(ArmStats("scripted", 9, 1.5, 2.0, 0.75, 0.1),) * 2)

    async def end_trial(self, promote: bool) -> None:
        if self.swap_state.status != "trial":
            raise RequestError("no drafter is being tried", status=409, code="no_trial")
        status = "promoted" if promote else "rolled_back"
        self.swap_state = replace(self.swap_state, status=status, reason="by hand")

    async def swap_states(self) -> dict[str, SwapState]:
        return {"replica": self.swap_state}

    async def load_adapter(self, adapter: AdapterRef) -> int:
        if self.adapter_error is not None:
            raise self.adapter_error
        self.adapters.append(adapter)
        return 1

    async def unload_adapter(self, adapter: AdapterRef) -> None:
        self.adapters.remove(adapter)


class FakeDirectory:
    """The adapters that were loaded at run time, for several ingress processes in one."""

    def __init__(self) -> None:
        self.by_name: dict[str, AdapterRef] = {}
        self.is_down = False

    async def adapters(self) -> list[AdapterRef]:
        if self.is_down:
            raise OSError("the directory is down")
        return list(self.by_name.values())

    async def add(self, adapter: AdapterRef) -> bool:
        return self.by_name.setdefault(adapter.name, adapter) == adapter

    async def remove(self, name: str) -> bool:
        return self.by_name.pop(name, None) is not None
