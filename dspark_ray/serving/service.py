"""Answers one job: runs its choices together and turns their outputs into a body or a stream of events."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from dspark_ray.core.errors import DsparkError
from dspark_ray.core.types import FinishReason, RequestOutput, RequestUsage
from dspark_ray.serving import responses
from dspark_ray.serving.errors import GenerationTimeoutError, http_error
from dspark_ray.serving.generation import Backend, Generation, RetryPolicy, Streams
from dspark_ray.serving.merge import merge
from dspark_ray.serving.parsing import Job
from dspark_ray.serving.text import ChoiceText, NewDetokenizer

logger = logging.getLogger(__name__)

ABORT_GRACE_S = 2.0  # how long the end of a choice waits for its usage after a stop string


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """What a choice adds to the answer; the last one carries the finish reason and the usage."""

    index: int
    text: str
    num_tokens: int
    finish_reason: FinishReason | None = None
    usage: RequestUsage | None = None


@dataclass(frozen=True, slots=True)
class CompletionService:
    """One per ingress process; every method belongs to its event loop."""

    backend: Backend
    streams: Streams
    new_detokenizer: NewDetokenizer
    timeout_s: float
    retry: RetryPolicy = field(default_factory=RetryPolicy)

    async def answer(self, job: Job) -> dict[str, Any]:
        """The whole body. Raises `DsparkError`; cancelling it aborts the job's requests."""
        texts: list[list[str]] = [[] for _ in job.requests]
        reasons = [FinishReason.STOP] * len(job.requests)
        tally = _Tally(job)
        async with aclosing(self._events(job)) as events:
            async for event in events:
                texts[event.index].append(event.text)
                tally.add(event)
                if event.finish_reason is not None:
                    reasons[event.index] = event.finish_reason
        return responses.full_body(job, ["".join(parts) for parts in texts], reasons, tally.body())

    async def stream(self, job: Job) -> "EventStream":
        """Server-sent events, the first of which is ready when this returns.

        Raises `DsparkError` for what happens before the first token, so that it still gets its HTTP
        status; later failures become an error event.
        """
        chunks = self._chunks(job)
        try:
            return EventStream(await anext(chunks), chunks)
        except BaseException:
            await chunks.aclose()
            raise

    async def _chunks(self, job: Job) -> AsyncGenerator[bytes, None]:
        tally = _Tally(job)
        async with aclosing(self._events(job)) as events:
            event: ChoiceEvent | None = await anext(events)
            opening = b""
            if job.chat:
                opening = b"".join(
                    responses.sse(responses.role_chunk(job, index)) for index in range(len(job.requests))
                )
            try:
                while event is not None:
                    tally.add(event)
                    if chunks := opening + _event_chunks(job, event):
                        yield chunks
                    opening = b""
                    event = await anext(events, None)
            except Exception as error:
                if not isinstance(error, DsparkError):
                    logger.exception("%s failed while it was streamed", job.id)
                yield responses.sse(http_error(error).body) + responses.DONE
                return
        usage = responses.sse(responses.usage_chunk(job, tally.body())) if job.include_usage else b""
        yield usage + responses.DONE

    async def _events(self, job: Job) -> AsyncGenerator[ChoiceEvent, None]:
        """The events of all choices as they come, under the job's time limit."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.timeout_s
        choices = [self._choice(job, index) for index in range(len(job.requests))]
        async with aclosing(merge(choices)) as events:
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        event = await anext(events, None)
                except TimeoutError as error:
                    message = f"the request took longer than {self.timeout_s:g} s"
                    raise GenerationTimeoutError(message) from error
                if event is None:
                    return
                yield event

    async def _choice(self, job: Job, index: int) -> AsyncGenerator[ChoiceEvent, None]:
        """One choice's text; a stop string ends it at once, only its usage is waited for."""
        generation = Generation(job.requests[index], self.backend, self.streams, self.retry)
        text = ChoiceText(self.new_detokenizer(job.text), job.text.include_stop)
        async with aclosing(generation.outputs()) as outputs:
            async for output in outputs:
                delta = text.add(output)
                usage = output.usage
                if delta.finish_reason is not None and output.finish_reason is None:
                    usage = await _usage_after_stop(generation, outputs)
                yield ChoiceEvent(index, delta.text, delta.num_tokens, delta.finish_reason, usage)
                if delta.finish_reason is not None:
                    return


@dataclass(frozen=True, slots=True)
class EventStream:
    """A started stream. Whoever holds it must `close` it, read to its end or not."""

    first: bytes
    rest: AsyncGenerator[bytes, None]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self.first
        async for chunk in self.rest:
            yield chunk

    async def close(self) -> None:
        """Aborts what still runs."""
        await self.rest.aclose()


class _Tally:
    """Counts a job's usage as its events pass."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._num_tokens = [0] * len(job.requests)
        self._usages: list[RequestUsage | None] = [None] * len(job.requests)

    def add(self, event: ChoiceEvent) -> None:
        self._num_tokens[event.index] += event.num_tokens
        if event.usage is not None:
            # Accepted tokens behind a stop string are not part of the text: they count as rejected.
            accepted = min(event.usage.accepted_tokens, self._num_tokens[event.index])
            self._usages[event.index] = replace(event.usage, accepted_tokens=accepted)

    def body(self) -> dict[str, Any]:
        return responses.usage_body(self._job, sum(self._num_tokens), self._usages)


def _event_chunks(job: Job, event: ChoiceEvent) -> bytes:
    """Text and end are two chunks for chat, as OpenAI sends them; nothing while text is held back."""
    chunks = b""
    if event.text:
        chunks += responses.sse(responses.text_chunk(job, event.index, event.text, None))
    if event.finish_reason is not None:
        chunks += responses.sse(responses.text_chunk(job, event.index, "", event.finish_reason))
    return chunks


async def _usage_after_stop(
    generation: Generation, outputs: AsyncIterator[RequestOutput]
) -> RequestUsage | None:
    """Aborts, and waits briefly for the final output, whose usage is wanted; None if it does not come."""
    generation.abort()
    try:
        async with asyncio.timeout(ABORT_GRACE_S):
            async for output in outputs:
                if output.usage is not None:
                    return output.usage
    except (TimeoutError, DsparkError):
        pass
    return None
