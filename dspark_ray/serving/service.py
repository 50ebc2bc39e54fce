"""Answers one job: runs its choices together and turns their outputs into a body or a stream of events."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dspark_ray.core.errors import DsparkError
from dspark_ray.core.types import CompiledGrammar, FinishReason, Request, RequestOutput, RequestUsage
from dspark_ray.serving import responses
from dspark_ray.serving.answer import Answer, AnswerDelta, ChoiceEvent
from dspark_ray.serving.errors import GenerationTimeoutError, http_error
from dspark_ray.serving.generation import Backend, Generation, RetryPolicy, Streams
from dspark_ray.serving.logprobs import ShownToken, TextOfToken, shown_prompt, shown_tokens
from dspark_ray.serving.merge import merge
from dspark_ray.serving.parsing import Job
from dspark_ray.serving.provenance import speculation_body
from dspark_ray.serving.response_events import ResponseEvents, response_body
from dspark_ray.serving.text import ChoiceText, NewDetokenizer

logger = logging.getLogger(__name__)

ABORT_GRACE_S = 2.0  # how long the end of a choice waits for its usage after a stop string


class StreamWriter(Protocol):
    """Server-sent events of one route."""

    def opening(self) -> bytes: ...

    def event(self, event: ChoiceEvent) -> bytes: ...

    def closing(self, usage: dict[str, Any]) -> bytes:
        """`usage` as `responses.usage_body` makes it."""
        ...

    def failure(self, error: dict[str, Any]) -> bytes:
        """`error` as `errors.error_body` makes it; nothing follows."""
        ...


Meter = Callable[[int], None]
"""Told of each output token once, so many at a time."""

CompileGrammar = Callable[[str], Awaitable[CompiledGrammar]]
"""A structural tag, compiled; raises `RequestError` for one that cannot be."""


WatchOutputs = Callable[[Request, AsyncGenerator[RequestOutput, None]], AsyncGenerator[RequestOutput, None]]
"""Passes on the outputs of a request unchanged, and looks at them; closes them when it is closed."""


def unwatched(
    request: Request, outputs: AsyncGenerator[RequestOutput, None]
) -> AsyncGenerator[RequestOutput, None]:
    return outputs


@dataclass(frozen=True, slots=True)
class CompletionService:
    """One per ingress process; every method belongs to its event loop."""

    backend: Backend
    streams: Streams
    new_detokenizer: NewDetokenizer
    token_text: TextOfToken
    timeout_s: float
    compile_grammar: CompileGrammar
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    watch: WatchOutputs = unwatched

    async def answer(self, job: Job, meter: Meter | None = None) -> dict[str, Any]:
        """The whole body. Raises `DsparkError`; cancelling it aborts the job's requests."""
        job = await self._constrained(job)
        answers = [Answer() for _ in job.requests]
        reasons = [FinishReason.STOP] * len(job.requests)
        tally = _Tally(job, meter)
        async with aclosing(self._events(job)) as events:
            async for event in events:
                answers[event.index].add(event.delta, event.tokens)
                tally.add(event)
                if event.finish_reason is not None:
                    reasons[event.index] = event.finish_reason
        if job.response is not None:
            return response_body(job.response, answers[0], reasons[0], tally.body())
        return responses.full_body(job, answers, reasons, tally.body())

    async def stream(self, job: Job, meter: Meter | None = None) -> "EventStream":
        """Server-sent events, the first of which is ready when this returns.

        Raises `DsparkError` for what happens before the first token, so that it still gets its HTTP
        status; later failures become an error event.
        """
        chunks = self._chunks(await self._constrained(job), meter)
        try:
            return EventStream(await anext(chunks), chunks)
        except BaseException:
            await chunks.aclose()
            raise

    async def _constrained(self, job: Job) -> Job:
        """With its grammar, if the text is to follow one."""
        if job.constraint is None:
            return job
        return job.with_grammar(await self.compile_grammar(job.constraint))

    async def _chunks(self, job: Job, meter: Meter | None) -> AsyncGenerator[bytes, None]:
        tally = _Tally(job, meter)
        writer: StreamWriter = (
            responses.ChunkWriter(job) if job.response is None else ResponseEvents(job.response)
        )
        async with aclosing(self._events(job)) as events:
            event: ChoiceEvent | None = await anext(events)
            opening = writer.opening()
            try:
                while event is not None:
                    tally.add(event)
                    if chunks := opening + writer.event(event):
                        yield chunks
                    opening = b""
                    event = await anext(events, None)
            except Exception as error:
                if not isinstance(error, DsparkError):
                    logger.exception("%s failed while it was streamed", job.id)
                yield writer.failure(http_error(error).body)
                return
        yield writer.closing(tally.body())

    async def _events(self, job: Job) -> AsyncGenerator[ChoiceEvent, None]:
        """The events of all choices as they come, under the job's time limit."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.timeout_s
        begun: list[bool] = []  # a stream's first event puts something in: no choice is refused any more

        def has_begun() -> bool:
            return bool(begun)

        choices = [self._choice(job, index, has_begun) for index in range(len(job.requests))]
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
                if job.stream and not begun:
                    begun.append(True)
                yield event

    async def _choice(
        self, job: Job, index: int, has_begun: Callable[[], bool]
    ) -> AsyncGenerator[ChoiceEvent, None]:
        """One choice's text; a stop string ends it at once, only its usage is waited for."""
        generation = Generation(
            job.requests[index], self.backend, self.streams, self.retry, has_begun=has_begun
        )
        text = ChoiceText(self.new_detokenizer(job.text), job.text.include_stop)
        reader = job.shape.reader()
        is_first = True
        async with aclosing(self.watch(job.requests[index], generation.outputs())) as outputs:
            async for output in outputs:
                if is_first and job.echo:
                    yield self._echo(job, index, output)
                is_first = False
                if job.echo_only:  # one token is generated, since no engine runs a request for none
                    yield ChoiceEvent(index, AnswerDelta(), 0, FinishReason.LENGTH, output.usage)
                    return
                delta = text.add(output)
                reason, usage = delta.finish_reason, output.usage
                if reason is not None and output.finish_reason is None:
                    usage = await _usage_after_stop(generation, outputs)
                answer = reader.push(delta.text, last=reason is not None)
                reason = None if reason is None else reader.finish_reason(reason)
                counted = output.token_ids[: delta.num_tokens]
                tokens = shown_tokens(counted, output.logprobs, self.token_text)
                speculation = speculation_body(output, delta)
                yield ChoiceEvent(index, answer, delta.num_tokens, reason, usage, tokens, speculation)
                if reason is not None:
                    return

    def _echo(self, job: Job, index: int, first: RequestOutput) -> ChoiceEvent:
        """The prompt, before anything else of a choice. first: its first output"""
        request, text = job.requests[index], job.echo[index // job.num_per_prompt]
        tokens: tuple[ShownToken, ...] = ()
        if request.sampling.prompt_logprobs is not None:
            tokens = shown_prompt(request.prompt_token_ids, first.prompt_logprobs, self.token_text)
        return ChoiceEvent(index, AnswerDelta(text), 0, tokens=tokens)


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

    def __init__(self, job: Job, meter: Meter | None) -> None:
        self._job = job
        self._meter = meter
        self._num_tokens = [0] * len(job.requests)
        self._usages: list[RequestUsage | None] = [None] * len(job.requests)

    def add(self, event: ChoiceEvent) -> None:
        self._num_tokens[event.index] += event.num_tokens
        if self._meter is not None:
            self._meter(event.num_tokens)
        if event.usage is not None:
            # Accepted tokens behind a stop string are not part of the text: they count as rejected.
            accepted = min(event.usage.accepted_tokens, self._num_tokens[event.index])
            self._usages[event.index] = replace(event.usage, accepted_tokens=accepted)

    def body(self) -> dict[str, Any]:
        return responses.usage_body(self._job, sum(self._num_tokens), self._usages)


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
