"""One choice from admission to its last token, whatever dies underneath.

A request is an *attempt* on one replica; when the attempt is lost, the next one starts on another replica
from prompt + emitted tokens. Every attempt has a request id of its own, so tokens of a lost one that still
arrive belong to nobody and are dropped: no token is sent twice.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from dspark_ray.core.errors import DsparkError, EngineDeadError, QueueFullError
from dspark_ray.core.types import FinishReason, Request, RequestOutput

logger = logging.getLogger(__name__)

StreamItem = RequestOutput | DsparkError


class StepError(EngineDeadError):
    """The step that held this request raised: the request itself may be the cause."""


class Backend(Protocol):
    """Runs one attempt on a replica of its own choice."""

    async def submit(self, request: Request) -> RequestOutput:
        """Returns the final output (its tokens went to `request.reply_address`) once the attempt ends.

        Raises `RequestError` if it can never run, `QueueFullError`, or `EngineDeadError` when its replica
        is gone. Cancelling it aborts the attempt.
        """
        ...


class Streams(Protocol):
    """Where the attempts' tokens arrive in this process."""

    address: str

    def open(self, request_id: str) -> "asyncio.Queue[StreamItem | None]": ...

    def discard(self, request_id: str) -> None:
        """Nobody wants its tokens any more."""
        ...

    def abort(self, request_id: str) -> None:
        """Asks the engine that sends to this stream to end it; its final output still arrives."""
        ...


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a lost attempt is followed by another one."""

    max_attempts: int = 5
    max_step_errors: int = 2  # a request that breaks every step it is in must not take the fleet down
    backoff_s: tuple[float, ...] = (0.05, 0.2, 0.5, 1.0)  # before the second attempt, the third, ...
    tail_timeout_s: float = 5.0  # for tokens still on their way when the attempt has ended


@dataclass
class Generation:
    """Iterate `outputs()` once; `abort()` from the same event loop ends it with `FinishReason.ABORT`."""

    request: Request
    backend: Backend
    streams: Streams
    policy: RetryPolicy = RetryPolicy()
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    has_begun: Callable[[], bool] = lambda: False  # whether something of the whole answer was sent

    def __post_init__(self) -> None:
        self._born_s = time.monotonic()
        self._emitted: list[int] = list(self.request.emitted_token_ids)
        self._attempt_id = ""
        self._aborted = False

    def abort(self) -> None:
        """A stop string was found: no more tokens are wanted, the usage still is."""
        self._aborted = True
        if self._attempt_id:
            self.streams.abort(self._attempt_id)

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """Each token once, in order; the last output has a finish reason. Leaving early aborts.

        Raises what `Backend.submit` raises, `EngineDeadError` only after the last attempt.
        """
        step_errors = 0
        for attempt in itertools.count(1):
            try:
                async with aclosing(self._attempt(attempt)) as outputs:
                    async for output in outputs:
                        self._emitted.extend(output.token_ids)
                        yield output
                return
            except (EngineDeadError, QueueFullError) as error:
                step_errors += isinstance(error, StepError)
                if attempt == 1 and isinstance(error, QueueFullError) and not self._is_begun():
                    raise
                if attempt >= self.policy.max_attempts or step_errors >= self.policy.max_step_errors:
                    raise
                logger.warning("%s: attempt %d lost: %s", self.request.request_id, attempt, error)
            if (ending := self._ending_without_engine()) is not None:
                yield ending
                return
            await self.sleep(self.policy.backoff_s[min(attempt, len(self.policy.backoff_s)) - 1])

    def _is_begun(self) -> bool:
        return bool(self._emitted) or self.has_begun()

    def _start_within_ms(self) -> float | None:
        """What is left of its time to start; none counts once its answer has begun."""
        if self.request.start_within_ms is None or self._is_begun():
            return None
        return max(0.0, self.request.start_within_ms - 1e3 * (time.monotonic() - self._born_s))

    def _ending_without_engine(self) -> RequestOutput | None:
        """The final output, where a lost attempt had nothing left to generate."""
        if self._aborted:
            return RequestOutput(self.request.request_id, (), FinishReason.ABORT)
        if len(self._emitted) >= self.request.sampling.max_tokens:
            return RequestOutput(self.request.request_id, (), FinishReason.LENGTH)
        return None

    async def _attempt(self, number: int) -> AsyncGenerator[RequestOutput, None]:
        """One replica's outputs up to the final one; raises `EngineDeadError` when it is lost."""
        request = replace(
            self.request,
            request_id=f"{self.request.request_id}.{number}",
            emitted_token_ids=tuple(self._emitted),
            reply_address=self.streams.address,
            start_within_ms=self._start_within_ms(),
            has_begun=self._is_begun(),
        )
        items = self.streams.open(request.request_id)
        call = asyncio.ensure_future(self.backend.submit(request))
        call.add_done_callback(lambda done: _wake(items, done))
        self._attempt_id = request.request_id
        ended = False
        try:
            while True:
                item = await items.get()
                if item is None:  # the call has ended; tokens may still be on their way
                    item = await self._tail(items, call.result())
                if isinstance(item, DsparkError):
                    raise item
                if item.finish_reason is FinishReason.ERROR:
                    kind = StepError if item.step_failed else EngineDeadError
                    raise kind(item.error or "the engine failed")
                ended = item.finish_reason is not None
                yield item
                if ended:
                    return
        finally:
            self._attempt_id = ""
            self.streams.discard(request.request_id)
            if not ended:  # else the call is about to return by itself
                call.cancel()

    async def _tail(self, items: "asyncio.Queue[StreamItem | None]", final: RequestOutput) -> StreamItem:
        """What follows the call's end: the final output by the stream, or the call's own as the backup."""
        try:
            item = await asyncio.wait_for(items.get(), self.policy.tail_timeout_s)
        except TimeoutError:
            item = None
        if item is not None:
            items.put_nowait(None)  # unless it was the final one, there is more to wait for
            return item
        if final.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            return final
        if final.usage is not None and final.usage.completion_tokens == len(self._emitted):
            return replace(final, token_ids=())
        return EngineDeadError("the attempt ended and its last tokens did not arrive")


def _wake(items: "asyncio.Queue[StreamItem | None]", call: "asyncio.Future[RequestOutput]") -> None:
    if not call.cancelled():
        call.exception()  # marks it as seen: who left early does not want it
    items.put_nowait(None)
