"""The step loop with a fake engine and in-process sockets: who gets which message, and what ends it."""

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from dspark_ray.core.clock import ManualClock
from dspark_ray.core.config import parse_app_config
from dspark_ray.core.errors import RankError, RequestError
from dspark_ray.core.types import FinishReason, Request, SamplingParams, StepPlan
from dspark_ray.runtime import transport
from dspark_ray.runtime.engine_loop import EngineLoop
from dspark_ray.runtime.messages import (
    Abort,
    ApplyPlan,
    Ends,
    Message,
    Rejected,
    Stop,
    Submit,
    Tokens,
    encode,
)
from dspark_ray.runtime.preparation import PrepareRequest
from dspark_ray.runtime.transport import IDLE_MS, STALLED_MS, Inbox, Outboxes, receive_all
from tests.fakes import POISON_TOKEN, FakeEngine, echo

CONFIG = parse_app_config({"model": {"max_model_len": 64}, "engine": {"max_running": 2, "max_waiting": 1}})
PROMPT = (11, 12, 13)
GENERATION = 5


class Bench:
    """A loop, and the inboxes of one server and two ingresses."""

    numbers = itertools.count()

    def __init__(self, prepare: PrepareRequest | None = None) -> None:
        self.context = zmq.Context()
        self.clock = ManualClock()
        self.engine = FakeEngine(CONFIG, step_ms=0.0, clock=self.clock)
        self.sockets: dict[str, zmq.Socket] = {}
        self.address = {name: self.bind(name) for name in ("engine", "server", "ingress-a", "ingress-b")}
        inbox = Inbox(self.sockets["engine"], self.address["engine"])
        outboxes = Outboxes(self.context, self.clock)
        self.loop = EngineLoop(self.engine, GENERATION, inbox, outboxes, self.clock, prepare=prepare)
        self.to_engine = self.context.socket(zmq.PUSH)
        self.to_engine.connect(self.address["engine"])

    def bind(self, name: str, high_water_mark: int = 1000) -> str:
        address = f"inproc://{name}-{next(self.numbers)}"
        self.sockets[name] = self.context.socket(zmq.PULL)
        self.sockets[name].setsockopt(zmq.RCVHWM, high_water_mark)
        self.sockets[name].bind(address)
        return address

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.to_engine.send(encode(message))

    def submit(
        self, request_id: str, ingress: str = "ingress-a", prompt: tuple[int, ...] = PROMPT, **kw: Any
    ) -> None:
        sampling = SamplingParams(**{"max_tokens": 7, **kw})
        request = Request(request_id, prompt, sampling, reply_address=self.address[ingress])
        self.send(Submit(request, self.address["server"]))

    def received(self, name: str) -> list[Any]:
        return receive_all(self.sockets[name])

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.loop.turn()

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_one_message_a_step_carries_all_streams_of_an_ingress(bench: Bench) -> None:
    bench.submit("r1")
    bench.submit("r2")
    bench.turn()
    (message,) = bench.received("ingress-a")
    assert isinstance(message, Tokens)
    assert (message.generation, message.inbox_address) == (GENERATION, bench.address["engine"])
    assert [emission.output.request_id for emission in message.emissions] == ["r1", "r2"]
    assert bench.received("server") == []


def test_tokens_go_to_their_ingress_and_ends_to_the_server(bench: Bench) -> None:
    bench.submit("r1", "ingress-a")
    bench.submit("r2", "ingress-b")
    bench.turn(3)
    for name, request_id in (("ingress-a", "r1"), ("ingress-b", "r2")):
        emissions = [emission for message in bench.received(name) for emission in message.emissions]
        assert [emission.offset for emission in emissions] == [0, 3, 6]
        tokens = [token for emission in emissions for token in emission.output.token_ids]
        assert tokens == [echo(PROMPT, position) for position in range(7)]
        assert emissions[-1].output.request_id == request_id
        assert emissions[-1].output.finish_reason is FinishReason.LENGTH
    (ends,) = bench.received("server")
    assert isinstance(ends, Ends)
    assert [output.request_id for output in ends.outputs] == ["r1", "r2"]
    assert ends.outputs[0].token_ids == ()
    assert ends.outputs[0].usage is not None
    assert ends.outputs[0].usage.completion_tokens == 7


def test_refusals_go_to_the_server(bench: Bench) -> None:
    bench.submit("long", max_tokens=1000)
    for k in range(4):
        bench.submit(f"r{k}")
    bench.submit("r0")
    bench.turn()
    rejected = {message.message: message for message in bench.received("server")}
    assert [message.queue_full for message in rejected.values()] == [False, True, False]
    first = next(iter(rejected.values()))
    assert isinstance(first, Rejected)
    assert (first.request_id, first.code, first.status) == ("long", "context_length_exceeded", 400)
    assert "in use" in list(rejected)[-1]


def test_an_abort_ends_with_the_usage_and_frees(bench: Bench) -> None:
    bench.submit("r1", max_tokens=50)
    bench.turn()
    bench.send(Abort("r1"), Abort("r1"), Abort("unknown"))
    bench.turn()
    (ends,) = bench.received("server")
    (output,) = ends.outputs
    assert output.finish_reason is FinishReason.ABORT
    assert output.usage is not None
    assert output.usage.completion_tokens == 3
    assert bench.received("ingress-a")[-1].emissions[0].output.finish_reason is FinishReason.ABORT
    assert not bench.engine.has_work()


def test_a_failing_step_tells_everyone_and_ends_the_loop(bench: Bench) -> None:
    bench.submit("good", "ingress-a")
    bench.submit("bad", "ingress-b", prompt=(POISON_TOKEN,))
    with pytest.raises(RuntimeError, match="poisoned"):
        bench.loop.run()
    for name in ("ingress-a", "ingress-b"):
        output = bench.received(name)[-1].emissions[0].output
        assert output.finish_reason is FinishReason.ERROR
        assert output.step_failed
    assert {output.request_id for output in bench.received("server")[0].outputs} == {"good", "bad"}


def test_a_lost_rank_is_no_requests_doing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on elsewhere, however often ranks are lost."""

    def lose() -> None:
        raise RankError("rank 1 has ended in message 7")

    monkeypatch.setattr(bench.engine, "step", lose)
    bench.submit("r1", "ingress-a")
    with pytest.raises(RankError):
        bench.loop.run()
    output = bench.received("ingress-a")[-1].emissions[0].output
    assert output.finish_reason is FinishReason.ERROR
    assert not output.step_failed


def test_stop_ends_the_loop_and_what_runs(bench: Bench) -> None:
    bench.submit("r1", max_tokens=50)
    bench.turn()
    bench.send(Stop())
    bench.loop.run()
    (output,) = bench.received("server")[-1].outputs
    assert output.finish_reason is FinishReason.ERROR
    assert not output.step_failed


def test_only_plans_for_this_incarnation_are_applied(bench: Bench) -> None:
    bench.send(ApplyPlan(StepPlan("me", GENERATION - 1, 1, "local")))
    bench.turn()
    assert bench.engine.stats().plan_age_ms is None
    bench.send(ApplyPlan(StepPlan("me", GENERATION, 1, "local")))
    bench.turn()
    assert bench.engine.stats().plan_age_ms == 0.0


def test_stray_packets_do_not_stop_the_loop(bench: Bench) -> None:
    bench.to_engine.send(b"junk")
    bench.send(Ends(1, ()))
    bench.submit("r1")
    bench.turn()
    assert len(bench.received("ingress-a")) == 1


def test_a_peer_that_takes_nothing_loses_its_requests(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "INBOX_MESSAGES", 1)
    bench.address["slow"] = bench.bind("slow", high_water_mark=1)
    bench.submit("gone", "slow", max_tokens=50)
    bench.submit("r1", max_tokens=50)
    for _ in range(6):
        bench.turn()
        bench.received("ingress-a")
    bench.clock.advance(STALLED_MS + 1)
    bench.turn()
    assert bench.engine.usage("gone") is None
    assert bench.engine.usage("r1") is not None
    ((end,),) = [message.outputs for message in bench.received("server")]
    assert (end.request_id, end.finish_reason, end.step_failed) == ("gone", FinishReason.ERROR, False)


def test_a_dead_server_is_told_to_the_ingress(bench: Bench) -> None:
    bench.submit("r1", max_tokens=50)
    bench.turn()
    bench.loop._drop_peer(bench.address["server"])
    output = bench.received("ingress-a")[-1].emissions[0].output
    assert (output.request_id, output.finish_reason) == ("r1", FinishReason.ERROR)
    assert bench.received("server") == []
    assert not bench.engine.has_work()


def test_lost_connections_are_noticed(bench: Bench) -> None:
    outbox = transport.Outbox(bench.context, bench.address["server"], bench.clock)
    assert outbox._socket.getsockopt(zmq.HEARTBEAT_IVL) == transport.HEARTBEAT_MS
    outbox.close()


def test_a_wrong_address_harms_nobody(bench: Bench) -> None:
    bench.send(Submit(Request("odd", PROMPT, SamplingParams(), reply_address="inproc://"), "inproc://"))
    bench.submit("r1")
    bench.turn(6)
    assert bench.received("server")[0].outputs[0].request_id == "r1"


def test_unused_outboxes_are_closed(bench: Bench) -> None:
    bench.submit("r1", max_tokens=1)
    bench.turn()
    bench.clock.advance(IDLE_MS + 1)
    bench.submit("r2", "ingress-b", max_tokens=1)
    bench.turn()
    assert set(bench.loop._outboxes._by_address) == {bench.address["ingress-b"], bench.address["server"]}


def test_the_snapshot_is_exact_when_idle(bench: Bench) -> None:
    bench.submit("r1")
    bench.turn(3)
    assert bench.loop.snapshot.counters.emitted_tokens == 7
    assert bench.loop.snapshot.num_running == 0


class SlowGrammars:
    """Requests whose id begins with `g` wait for `go`; then those that end in `!` are refused."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self, request: Request) -> Any:
        def load() -> None:
            assert self.go.wait(10.0)
            if request.request_id.endswith("!"):
                raise RequestError("no grammar", code="invalid_grammar")

        return load if request.request_id.startswith("g") else None


def test_others_go_on_while_a_request_is_prepared() -> None:
    slow = SlowGrammars()
    bench = Bench(slow)
    for request_id in ("g1", "g2", "g3!", "r1"):
        bench.submit(request_id)
    bench.turn(3)
    ids = {e.output.request_id for message in bench.received("ingress-a") for e in message.emissions}
    assert ids == {"r1"}
    bench.send(Abort("g2"))
    bench.turn()
    (aborted,) = [output for end in bench.received("server") for output in end.outputs if end.outputs][1:]
    assert (aborted.request_id, aborted.finish_reason) == ("g2", FinishReason.ABORT)
    bench.received("ingress-a")
    slow.go.set()
    while bench.loop._preparation.is_busy:
        bench.turn()
    bench.turn(3)
    ends = bench.received("server")
    (rejected,) = [message for message in ends if isinstance(message, Rejected)]
    assert (rejected.request_id, rejected.code) == ("g3!", "invalid_grammar")
    emissions = [e for message in bench.received("ingress-a") for e in message.emissions]
    assert {e.output.request_id for e in emissions} == {"g1"}
    assert emissions[-1].output.finish_reason is FinishReason.LENGTH
    bench.close()


def test_others_have_the_loop_call_something_between_steps(bench: Bench) -> None:
    seen: list[str] = []

    def refuse() -> None:
        raise RequestError("not now")

    done, refused = bench.loop.call(lambda: seen.append("called")), bench.loop.call(refuse)
    assert not done.done()
    bench.loop.turn()
    assert (done.result(), seen) == (None, ["called"])
    with pytest.raises(RequestError, match="not now"):
        refused.result()


def test_the_snapshot_tells_how_long_requests_took(bench: Bench) -> None:
    bench.submit("r", max_tokens=7)
    for _ in range(5):
        bench.clock.advance(40.0)
        bench.turn()
    times = bench.loop.snapshot.times
    assert times.first_token.cumulative[-1] == ("+Inf", 1)
    assert times.per_token.sum_ms > 0
    assert times.good_tokens == 7
