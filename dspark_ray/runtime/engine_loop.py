"""The step loop: drain the inbox, step, send one message per peer. One thread, no Ray, no waiting for peers.

The owner of a request is whoever submitted it: its tokens go to the ingress' address in the request, its end
to the server that sent it.
"""

import logging
import queue
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

from dspark_ray.core.clock import Clock
from dspark_ray.core.config import GoodputConfig
from dspark_ray.core.errors import DsparkError, EngineDeadError, QueueFullError, RequestError
from dspark_ray.core.types import (
    EngineStats,
    FinishReason,
    Request,
    RequestOutput,
    RequestUsage,
    StepPlan,
    SurvivalReport,
)
from dspark_ray.runtime.messages import (
    Abort,
    ApplyPlan,
    Emission,
    Ends,
    Message,
    Rejected,
    Stop,
    Submit,
    Tokens,
)
from dspark_ray.runtime.preparation import Preparation, PrepareRequest
from dspark_ray.runtime.request_tally import RequestTally, Stopwatch
from dspark_ray.runtime.transport import Inbox, Outboxes, receive_all

logger = logging.getLogger(__name__)

IDLE_WAIT_MS = 1000
FLUSH_WAIT_MS = 5  # between attempts to send what a peer has not taken yet
SNAPSHOT_MS = 200.0


class StepEngine(Protocol):
    """The engine as the loop drives it; every call comes from the loop's thread."""

    def add_request(self, request: Request) -> None: ...

    def abort(self, request_id: str) -> bool: ...

    def usage(self, request_id: str) -> RequestUsage | None:
        """What a request has cost so far; None if it is not here."""
        ...

    def take_shed(self) -> list[tuple[str, QueueFullError]]:
        """Requests that it had queued and will not run after all, each once, and what to tell them."""
        ...

    def has_work(self) -> bool: ...

    def step(self) -> list[RequestOutput]: ...

    def stats(self) -> EngineStats: ...

    def make_report(
        self, replica_id: str, generation: int, sequence: int, include_table: bool
    ) -> SurvivalReport: ...

    def apply_plan(self, plan: StepPlan) -> None: ...

    def describe(self) -> dict[str, Any]:
        """What was loaded, for the start-up log: target, drafter, step table, KV."""
        ...


class Reporter(Protocol):
    """Tells the central scheduler how the engine does; `tick` must return at once."""

    def tick(self, engine: StepEngine) -> None: ...

    def wait_ms(self) -> float:
        """Until the next report is due."""
        ...


@dataclass(slots=True)
class _Owner:
    """Whose request it is, and how many tokens were sent."""

    request: Request
    server_address: str
    watch: Stopwatch | None
    num_sent: int = 0


class EngineLoop:
    """`run()` until a `Stop` message; raises what a step raised, after its requests were told."""

    def __init__(
        self,
        engine: StepEngine,
        generation: int,
        inbox: Inbox,
        outboxes: Outboxes,
        clock: Clock,
        reporter: Reporter | None = None,
        prepare: PrepareRequest | None = None,
        goodput: GoodputConfig | None = None,
    ) -> None:
        self._engine = engine
        self._generation = generation
        self._inbox = inbox
        self._outboxes = outboxes
        self._clock = clock
        self._reporter = reporter
        self._preparation = Preparation(prepare or (lambda request: None))
        self._owners: dict[str, _Owner] = {}
        self._tally = RequestTally(goodput or GoodputConfig())
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()
        self._stopped = False
        self._snapshot_at_ms = 0.0
        self.snapshot: EngineStats = engine.stats()  # replaced as a whole: other threads may read it
        self.turn_at_ms = clock.now_ms()  # when the loop last turned: a stuck step shows here

    def run(self) -> None:
        try:
            while not self._stopped:
                self.turn()
        finally:
            self._fail_all("the engine stopped")
            self._preparation.close()
            self._outboxes.close()
            self._inbox.socket.close()

    def call(self, function: Callable[[], None]) -> "Future[None]":
        """Runs it between two steps, a second later at most. For any thread."""
        future: Future[None] = Future()
        self._calls.put((function, future))
        return future

    def turn(self) -> None:
        """One round; blocks only while there is nothing to do."""
        self._receive()
        self._answer_calls()
        if self._engine.has_work():
            self._deliver(self._step())
        self._tell_shed()
        self._outboxes.flush()
        for address in self._outboxes.drop_dead():
            self._drop_peer(address)
        if self._reporter is not None:
            self._reporter.tick(self._engine)
        self._take_snapshot()
        self.turn_at_ms = self._clock.now_ms()

    def _receive(self) -> None:
        if not self._engine.has_work():
            self._inbox.socket.poll(self._idle_wait_ms())
        for message in receive_all(self._inbox.socket):
            self._handle(message)
        for prepared, error in self._preparation.finished():
            self._admit(prepared, error)

    def _answer_calls(self) -> None:
        while not self._calls.empty():
            function, future = self._calls.get()
            try:
                future.set_result(function())
            except DsparkError as error:
                future.set_exception(error)

    def _idle_wait_ms(self) -> int:
        soon = self._outboxes.is_waiting or self._preparation.is_busy
        wait_ms: float = FLUSH_WAIT_MS if soon else IDLE_WAIT_MS
        if self._reporter is not None:
            wait_ms = min(wait_ms, self._reporter.wait_ms())
        return max(1, int(wait_ms))

    def _handle(self, message: Message) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort(request_id):
                self._abort(request_id)
            case ApplyPlan(plan):
                if plan.generation == self._generation:
                    self._engine.apply_plan(plan)
            case Stop():
                self._stopped = True
            case _:
                logger.warning("dropped a %s message: it is not for an engine", type(message).__name__)

    def _submit(self, message: Submit) -> None:
        request_id = message.request.request_id
        if request_id in self._owners:
            self._reject(message, RequestError(f"request id {request_id!r} is in use"))
            return
        watch = self._tally.start(message.request, self._clock.now_ms())
        self._owners[request_id] = _Owner(message.request, message.server_address, watch)
        if not self._preparation.take(message):
            self._admit(message)

    def _admit(self, message: Submit, error: BaseException | None = None) -> None:
        """Into the engine, unless there is an error against it."""
        try:
            if error is not None:
                raise error
            self._engine.add_request(message.request)
        except (RequestError, QueueFullError) as refusal:
            del self._owners[message.request.request_id]
            self._reject(message, refusal)

    def _reject(self, message: Submit, error: RequestError | QueueFullError) -> None:
        rejection = Rejected.of(self._generation, message.request.request_id, error)
        self._outboxes.send(message.server_address, rejection)

    def _tell_shed(self) -> None:
        """Requests that the engine has taken out of its queue."""
        for request_id, error in self._engine.take_shed():
            owner = self._owners.pop(request_id, None)
            if owner is not None:  # else its peer has gone
                self._reject(Submit(owner.request, owner.server_address), error)

    def _abort(self, request_id: str) -> None:
        usage = self._engine.usage(request_id)
        if self._engine.abort(request_id) or self._preparation.drop(request_id):
            self._deliver([RequestOutput(request_id, (), FinishReason.ABORT, usage)])

    def _step(self) -> list[RequestOutput]:
        try:
            return self._engine.step()
        except Exception as error:
            logger.exception("a step failed: this engine ends")
            # A rank that is gone is no request's doing.
            its_own = not isinstance(error, EngineDeadError)
            self._fail_all(f"the engine failed in a step: {type(error).__name__}", step_failed=its_own)
            raise

    def _fail_all(self, reason: str, *, step_failed: bool = False) -> None:
        self._deliver([_failure(request_id, reason, step_failed) for request_id in self._owners])

    def _deliver(self, outputs: list[RequestOutput], *, without: str = "") -> None:
        """One `Tokens` message per ingress and one `Ends` per server; none to the address `without`."""
        emissions: dict[str, list[Emission]] = defaultdict(list)
        ends: dict[str, list[RequestOutput]] = defaultdict(list)
        now_ms = self._clock.now_ms()
        for output in outputs:
            owner = self._owners.get(output.request_id)
            if owner is None:
                continue  # aborted in the meantime
            self._tally.note(owner.watch, output, now_ms)
            if owner.request.reply_address not in ("", without):
                emissions[owner.request.reply_address].append(Emission(owner.num_sent, output))
            owner.num_sent += len(output.token_ids)
            if output.finish_reason is not None:
                del self._owners[output.request_id]
                end = RequestOutput(output.request_id, (), output.finish_reason, output.usage, output.error)
                ends[owner.server_address].append(end)
        for address, tokens in emissions.items():
            self._outboxes.send(address, Tokens(self._generation, self._inbox.address, tuple(tokens)))
        ends.pop(without, None)
        for address, finals in ends.items():
            self._outboxes.send(address, Ends(self._generation, tuple(finals)))

    def _drop_peer(self, address: str) -> None:
        """Nobody reads there any more: its requests would run for nothing. The other peer of each is told."""
        lost = [
            request_id
            for request_id, owner in self._owners.items()
            if address in (owner.request.reply_address, owner.server_address)
        ]
        logger.warning("%s takes no messages: %d of its requests are aborted", address, len(lost))
        for request_id in lost:
            self._engine.abort(request_id)
            self._preparation.drop(request_id)
        failures = [_failure(request_id, "a peer of this request takes no messages") for request_id in lost]
        self._deliver(failures, without=address)

    def _take_snapshot(self) -> None:
        now_ms = self._clock.now_ms()
        if now_ms - self._snapshot_at_ms >= SNAPSHOT_MS or not self._engine.has_work():
            self.snapshot = replace(self._engine.stats(), times=self._tally.times())
            self._snapshot_at_ms = now_ms


def _failure(request_id: str, reason: str, step_failed: bool = False) -> RequestOutput:
    return RequestOutput(request_id, (), FinishReason.ERROR, error=reason, step_failed=step_failed)
