"""Requests through an engine without a server: what the command line, evaluation and benchmarks run on.

run = timed_run(engine, [Request(...), ...], concurrency=8)
print(run.tokens_per_s, run.counters.tau, [c.token_ids for c in run.completions])
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from dspark_ray.core.clock import Clock, SystemClock
from dspark_ray.core.errors import QueueFullError, RequestError
from dspark_ray.core.types import FinishReason, Request, RequestOutput, RequestUsage
from dspark_ray.engine.engine import Engine
from dspark_ray.models.tokenizer import IncrementalDetokenizer

OnStep = Callable[[list[RequestOutput]], None]


@dataclass(frozen=True, slots=True)
class Completion:
    """One request's answer. Times are the clock's, so that those of one run can be compared."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: RequestUsage
    submitted_ms: float
    first_token_ms: float  # when the step ended that emitted it; `ended_ms` for an answer without tokens
    ended_ms: float
    text: str = ""  # with detokenisers only; ends before a stop string
    error: str = ""  # set with FinishReason.ERROR: why the request could not run


def generate_all(
    engine: Engine,
    requests: Sequence[Request],
    *,
    concurrency: int,
    on_step: OnStep | None = None,
    detokenizers: Sequence[IncrementalDetokenizer] | None = None,
    clock: Clock | None = None,
    arrivals_ms: Sequence[float] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Completion]:
    """Runs all requests, `concurrency` of them in flight, and returns their answers in order.

    `arrivals_ms`, ascending, from the start of the run: no request is submitted before its time, and one that
    finds all places taken counts as submitted then all the same. `sleep` passes the time (in seconds) while
    nobody is there.
    `on_step` is called after each step with its outputs. `detokenizers`, one a request, make text and end
    a request at a stop string. A request that can never run becomes a completion with an error. The engine
    must be idle, and is idle afterwards, an exception included.
    """
    assert concurrency >= 1, "at least one request is in flight"
    assert not engine.has_work(), "the engine is busy with other requests"
    assert detokenizers is None or len(detokenizers) == len(requests), "one detokeniser a request"
    assert arrivals_ms is None or len(arrivals_ms) == len(requests), "one arrival a request"
    run = _Run(engine, requests, detokenizers, clock or SystemClock(), arrivals_ms, sleep)
    try:
        while run.submit(concurrency):
            outputs = engine.step()
            run.take(outputs)
            if on_step is not None:
                on_step(outputs)
    finally:
        run.abort_all()
    return run.completions()


@dataclass(slots=True)
class _Flight:
    """A request on its way."""

    index: int
    submitted_ms: float
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    first_token_ms: float | None = None


class _Run:
    """The bookkeeping of `generate_all`."""

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        detokenizers: Sequence[IncrementalDetokenizer] | None,
        clock: Clock,
        arrivals_ms: Sequence[float] | None,
        sleep: Callable[[float], None],
    ) -> None:
        self._engine, self._requests, self._detokenizers = engine, requests, detokenizers
        self._clock, self._sleep = clock, sleep
        self._arrivals_ms, self._started_ms = arrivals_ms, clock.now_ms()
        self._next = 0
        self._flights: dict[str, _Flight] = {}
        self._done: dict[int, Completion] = {}

    def submit(self, concurrency: int) -> bool:
        """Fills the free places; False when everything has been answered."""
        while self._next < len(self._requests) and len(self._flights) < concurrency:
            arrived_ms = self._arrived_ms()
            if arrived_ms is None:
                break
            request = self._requests[self._next]
            flight = _Flight(self._next, arrived_ms)
            try:
                self._engine.add_request(request)
            except RequestError as error:
                usage = RequestUsage(prompt_tokens=len(request.prompt_token_ids))
                self._finish(request.request_id, flight, FinishReason.ERROR, usage, error.message)
            except QueueFullError:
                if not self._flights:
                    raise
                break
            else:
                self._flights[request.request_id] = flight
            self._next += 1
        return bool(self._flights)

    def _arrived_ms(self) -> float | None:
        """When the next request came; None if it has not yet, and others are there to go on with."""
        now_ms = self._clock.now_ms()
        if self._arrivals_ms is None:
            return now_ms
        due_ms = self._started_ms + self._arrivals_ms[self._next]
        if due_ms > now_ms:
            if self._flights:
                return None
            self._sleep((due_ms - now_ms) / 1e3)
        return due_ms

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """A step's tokens, and the ends among them."""
        for output in outputs:
            flight = self._flights[output.request_id]
            if output.token_ids and flight.first_token_ms is None:
                flight.first_token_ms = self._clock.now_ms()
            if self._detokenizers is not None and self._push(flight, output):
                usage = output.usage or self._engine.usage(output.request_id) or RequestUsage()
                self._engine.abort(output.request_id)  # harmless if the step ended it anyway
                self._finish(output.request_id, flight, FinishReason.STOP, _up_to(flight, usage))
                continue
            if self._detokenizers is None:
                flight.token_ids += output.token_ids
            if output.finish_reason is not None:
                assert output.usage is not None, "the last output carries the usage"
                self._finish(output.request_id, flight, output.finish_reason, output.usage, output.error)

    def _push(self, flight: _Flight, output: RequestOutput) -> bool:
        """Adds text and the tokens that count; whether a stop string ended the text."""
        assert self._detokenizers is not None
        detokenizer = self._detokenizers[flight.index]
        delta = detokenizer.push(output.token_ids)
        flight.token_ids += output.token_ids[: delta.num_tokens]
        flight.text += delta.text
        if output.finish_reason is not None and not delta.stopped:
            flight.text += detokenizer.flush()
        return detokenizer.stopped

    def _finish(
        self, request_id: str, flight: _Flight, reason: FinishReason, usage: RequestUsage, error: str = ""
    ) -> None:
        now_ms = self._clock.now_ms()
        self._flights.pop(request_id, None)
        self._done[flight.index] = Completion(
            request_id=request_id,
            token_ids=tuple(flight.token_ids),
            finish_reason=reason,
            usage=usage,
            submitted_ms=flight.submitted_ms,
            first_token_ms=now_ms if flight.first_token_ms is None else flight.first_token_ms,
            ended_ms=now_ms,
            text=flight.text,
            error=error,
        )

    def abort_all(self) -> None:
        for request_id in self._flights:
            self._engine.abort(request_id)

    def completions(self) -> list[Completion]:
        return [self._done[index] for index in range(len(self._requests))]


def _up_to(flight: _Flight, usage: RequestUsage) -> RequestUsage:
    """`usage` without the tokens behind a stop string, which are not part of the answer."""
    num_tokens = len(flight.token_ids)
    accepted = min(usage.accepted_tokens, num_tokens)
    return replace(usage, completion_tokens=num_tokens, accepted_tokens=accepted)
