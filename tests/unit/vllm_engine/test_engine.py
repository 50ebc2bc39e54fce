"""The adapter over a stand-in for `AsyncLLM`: threads, outputs, usage, errors, death."""

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dspark_ray.core.clock import ManualClock
from dspark_ray.core.config import parse_app_config
from dspark_ray.core.errors import DsparkError, EngineDeadError, QueueFullError, RequestError
from dspark_ray.core.types import (
    AdapterRef,
    FinishReason,
    Request,
    RequestOutput,
    RequestUsage,
    SamplingParams,
    StepPlan,
)
from dspark_ray.scheduling.step_table import StepTable
from dspark_ray.vllm_engine.counters import VllmCounters
from dspark_ray.vllm_engine.engine import VllmEngine
from dspark_ray.vllm_engine.link import CoreReport
from tests.unit.vllm_engine.test_counters import scheduler

CONFIG = parse_app_config(
    {
        "model": {"max_model_len": 32},
        "engine": {"kind": "vllm", "max_running": 2, "max_waiting": 1},
        "speculation": {"drafter": {"kind": "ngram"}, "num_draft_tokens": 3, "mode": "fixed"},
    }
)
PROMPT = (1, 2, 3)


class RefusedError(Exception):
    """What vLLM says of a request that it does not take."""


class FakeClient:
    """`VllmClient`; tests put outputs into the collectors it hands out."""

    def __init__(self) -> None:
        self.collectors: dict[str, asyncio.Queue[Any]] = {}
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.aborted: list[str] = []
        self.errored = False
        self.was_shut_down = False
        self.num_kv_blocks = 100
        self.loop = asyncio.get_running_loop()

    async def add(self, request: Request) -> Any:
        if request.sampling.temperature > 2:
            raise RefusedError("temperature must be in [0, 2]")
        if request.sampling.seed is not None:
            raise {1: ConnectionError("no core"), 2: KeyError("a bug")}[request.sampling.seed]
        queue: Any = asyncio.Queue()
        queue.request_id = request.request_id
        self.collectors[request.request_id] = queue
        self.prompts[request.request_id] = (*request.prompt_token_ids, *request.emitted_token_ids)
        return queue

    async def abort(self, collector: Any) -> None:
        self.aborted.append(collector.request_id)

    async def load_adapter(self, ref: AdapterRef) -> None:
        raise {"refused": RequestError("no such file"), "dead": ConnectionError("no core")}[ref.name]

    def as_error(self, error: Exception) -> DsparkError | None:
        if isinstance(error, ConnectionError):
            return EngineDeadError(str(error))
        return RequestError(str(error)) if isinstance(error, RefusedError) else None

    def shutdown(self) -> None:
        self.was_shut_down = True

    def emit(self, **tokens: Any) -> None:
        """One step: outputs by request id, all in one turn of the event loop."""

        def put() -> None:
            for request_id, output in tokens.items():
                self.collectors[request_id].put_nowait(output)

        self.loop.call_soon_threadsafe(put)


def output(*token_ids: int, finish: str | None = None, cached: int = 0, drafts: Any = None) -> Any:
    """vLLM's `RequestOutput`, as far as it is read."""
    completion = SimpleNamespace(
        token_ids=list(token_ids), finish_reason=finish, spec_decode_metrics=drafts, logprobs=None
    )
    return SimpleNamespace(outputs=[completion], num_cached_tokens=cached, prompt_logprobs=None)


class FakeLink:
    """To vLLM's scheduler; tests put reports into it."""

    def __init__(self) -> None:
        self.sent: list[StepPlan] = []
        self.reports: list[CoreReport] = []
        self.is_closed = False

    def send(self, plan: StepPlan) -> None:
        self.sent.append(plan)

    def newest_report(self) -> CoreReport | None:
        return self.reports.pop() if self.reports else None

    def close(self) -> None:
        self.is_closed = True


class Bench:
    def __init__(self, link: Any = None) -> None:
        self.clock = ManualClock()
        self.client: FakeClient | None = None

        async def connect(counters: VllmCounters) -> FakeClient:
            self.client = FakeClient()
            self.counters = counters
            return self.client

        self.engine = VllmEngine(CONFIG, connect, {"target": "a fake"}, clock=self.clock, link=link)
        assert self.client is not None
        self.fake: FakeClient = self.client

    def add(self, request_id: str, max_tokens: int = 8, **fields: Any) -> None:
        emitted = fields.pop("emitted", ())
        sampling = SamplingParams(max_tokens=max_tokens, **fields)
        self.engine.add_request(Request(request_id, PROMPT, sampling, emitted))

    def step(self) -> list[RequestOutput]:
        """The next step that emits something."""
        deadline = time.monotonic() + 5.0
        while not (outputs := self.engine.step()):
            assert time.monotonic() < deadline, "nothing was emitted"
        return outputs


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.engine.close()
    assert bench.fake.was_shut_down


def test_one_step_leaves_together(bench: Bench) -> None:
    bench.add("a")
    bench.add("b")
    bench.fake.emit(a=output(5), b=output(6, 7))
    assert bench.step() == [RequestOutput("a", (5,)), RequestOutput("b", (6, 7))]
    assert bench.engine.step() == []
    assert bench.engine.has_work()


def test_usage_is_exact(bench: Bench) -> None:
    bench.add("a")
    bench.fake.emit(a=output(5, cached=2))
    bench.step()
    assert bench.engine.usage("a") == RequestUsage(3, 2, 1)
    # Of three steps, one accepted nothing, one a single token, one two.
    drafts = SimpleNamespace(num_draft_tokens=9, histogram=[1, 1, 1, 0])
    bench.fake.emit(a=output(6, 7, finish="stop", drafts=drafts))
    usage = RequestUsage(3, 2, 3, drafted_tokens=9, verified_tokens=9, accepted_tokens=3)
    assert bench.step() == [RequestOutput("a", (6, 7), FinishReason.STOP, usage)]
    assert not bench.engine.has_work()
    assert bench.engine.stats().num_finished == 1


def test_a_resumed_request_goes_on_where_it_was(bench: Bench) -> None:
    bench.add("a", max_tokens=4, emitted=(5, 6, 7))
    assert bench.fake.prompts["a"] == (1, 2, 3, 5, 6, 7)
    bench.fake.emit(a=output(8, finish="length", cached=6))
    (end,) = bench.step()
    assert end.usage == RequestUsage(prompt_tokens=3, cached_tokens=3, completion_tokens=4)


def test_usage_counts_what_was_given_out(bench: Bench) -> None:
    """An abort may come while tokens wait that nobody will see."""
    bench.add("a")
    bench.add("b")
    bench.fake.emit(a=output(5))
    bench.step()
    bench.fake.emit(a=output(6, 7))
    bench.fake.emit(b=output(8))
    assert bench.engine.usage("a") == RequestUsage(3, 0, 1)
    assert bench.engine.abort("a")


def test_an_aborted_request_is_silent(bench: Bench) -> None:
    bench.add("a")
    bench.add("b")
    assert bench.engine.abort("a")
    assert not bench.engine.abort("a")
    bench.fake.emit(a=output(5), b=output(6))
    assert bench.step() == [RequestOutput("b", (6,))]
    assert bench.fake.aborted == ["a"]
    assert bench.engine.stats().num_aborted == 1


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"max_tokens": 30}, RequestError, "exceed the model's 32"),
        ({"max_tokens": 2, "emitted": (5, 6)}, RequestError, "nothing to generate"),
        ({"temperature": 3.0}, RequestError, "temperature must be in"),
        ({"seed": 1}, EngineDeadError, "no core"),
        ({"seed": 2}, RequestError, "the engine failed on this request"),
    ],
)
def test_requests_that_cannot_run(
    bench: Bench, fields: dict[str, Any], error: type[DsparkError], message: str
) -> None:
    with pytest.raises(error, match=message):
        bench.add("a", **fields)
    assert not bench.engine.has_work()


def test_a_full_queue_refuses(bench: Bench) -> None:
    for name in "abc":
        bench.add(name)
    with pytest.raises(QueueFullError, match="3 requests"):
        bench.add("d")


def test_a_request_that_vllm_fails_on_ends_alone(bench: Bench) -> None:
    bench.add("a")
    bench.add("b")

    def fail() -> None:
        bench.fake.collectors["a"].get = _raise  # type: ignore[method-assign]

    bench.fake.emit(a=output(5))
    bench.step()
    bench.fake.loop.call_soon_threadsafe(fail)
    bench.fake.emit(a=output(6), b=output(7))
    ends = {o.request_id: o for o in bench.step()}
    while "a" not in ends or ends["a"].finish_reason is None:
        ends |= {o.request_id: o for o in bench.step()}
    assert ends["a"].finish_reason is FinishReason.ERROR
    assert "a token too many" in ends["a"].error
    assert bench.engine.usage("b") is not None


async def _raise() -> None:
    raise RuntimeError("a token too many")


def test_death_ends_the_engine_even_when_idle(bench: Bench) -> None:
    assert not bench.engine.has_work()
    bench.fake.errored = True
    assert bench.engine.has_work()  # so that the loop calls step()
    with pytest.raises(EngineDeadError, match="engine core is dead"):
        bench.engine.step()


def test_a_model_that_does_not_load_leaves_no_thread_behind() -> None:
    async def connect(counters: VllmCounters) -> FakeClient:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        VllmEngine(CONFIG, connect, {})


def test_plans_age(bench: Bench) -> None:
    assert bench.engine.stats().plan_age_ms is None
    bench.engine.apply_plan(StepPlan("r", 1, 1, "local", ttl_ms=100.0))
    bench.clock.advance(60.0)
    assert bench.engine.stats().plan_age_ms == 60.0
    bench.clock.advance(60.0)
    assert bench.engine.stats().plan_age_ms is None
    report = bench.engine.make_report("r", 1, 2, include_table=True)
    assert report.survival.shape == (0, 3)
    assert (report.table, report.table_digest) == (None, "")


def test_an_adapter_that_cannot_be_served(bench: Bench) -> None:
    for name, error in (("refused", RequestError), ("dead", EngineDeadError)):
        with pytest.raises(error):
            bench.engine.load(AdapterRef(name, "/x", "digest"))


def test_plans_go_to_vllm_and_what_it_tells_comes_back() -> None:
    link = FakeLink()
    bench = Bench(link)
    plans = [StepPlan("r", 1, number, "shared_cap", 50.0) for number in (2, 1, 3)]
    for plan in plans:
        bench.engine.apply_plan(plan)
    assert link.sent == [plans[0], plans[2]]  # the older one is not passed on
    assert bench.engine.make_report("r", 1, 1, include_table=True).table_digest == ""
    survival = np.array([[0.9, 0.8, 0.1]], dtype=np.float32)
    assert bench.engine.stats().rates == ()
    table = StepTable(rows=np.array([1, 8]), verify_ms=np.array([10.0, 10.0]))
    link.reports.append(CoreReport(survival, 4, table.to_dict(), "digest"))
    bench.counters.record(scheduler(running=1), None, 0)
    report = bench.engine.make_report("r", 1, 2, include_table=True)
    assert (report.survival.tolist(), report.base_rows) == (survival.tolist(), 4)
    assert (report.table_digest, report.table) == ("digest", table.to_dict())
    (one, _) = bench.engine.stats().rates  # what router and autoscaling ask for: of one request, and of two
    assert one == (1, pytest.approx((1 + 0.9 + 0.8 + 0.1) / 10e-3))
    assert bench.engine.make_report("r", 1, 3, include_table=False).table is None
    bench.counters.record(scheduler(running=0), None, 0)
    idle = bench.engine.make_report("r", 1, 4, include_table=False)
    assert (idle.survival.shape, idle.table_digest) == ((0, 3), "digest")  # it has the table still
    bench.engine.close()
    assert link.is_closed
