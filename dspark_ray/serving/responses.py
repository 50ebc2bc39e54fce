"""Response bodies and stream chunks in OpenAI's shapes, as plain dicts."""

import json
from collections.abc import Sequence
from typing import Any

from dspark_ray.core.types import AdapterRef, FinishReason, RequestUsage
from dspark_ray.serving.answer import Answer, AnswerDelta, ChoiceEvent
from dspark_ray.serving.logprobs import ShownToken, chat_logprobs, completion_logprobs
from dspark_ray.serving.parsing import Job, ServedModel
from dspark_ray.serving.tool_calls import CallDelta

DONE = b"data: [DONE]\n\n"


def sse(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def usage_body(job: Job, completion_tokens: int, usages: Sequence[RequestUsage | None]) -> dict[str, Any]:
    """`usage` over all choices. completion_tokens: tokens of the texts; details: what the engine counted."""
    known = [usage for usage in usages if usage is not None]
    accepted = sum(usage.accepted_tokens for usage in known)
    rejected = sum(usage.verified_tokens - usage.accepted_tokens for usage in known)
    return {
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": job.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": min(_cached(job, usages), job.prompt_tokens)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        },
    }


def _cached(job: Job, usages: Sequence[RequestUsage | None]) -> int:
    """Each prompt once: its first choice's hits (the others find the first one's blocks)."""
    firsts = usages[:: job.num_per_prompt]
    return sum(usage.cached_tokens for usage in firsts if usage is not None)


def full_body(
    job: Job, answers: Sequence[Answer], reasons: Sequence[FinishReason], usage: dict[str, Any]
) -> dict[str, Any]:
    """The answer of a request that does not stream."""
    choices = []
    for index, (answer, reason) in enumerate(zip(answers, reasons, strict=True)):
        content = {"message": _message(answer)} if job.chat else {"text": answer.content}
        logprobs = _logprobs(job, answer.tokens)
        choices.append({"index": index, **content, "logprobs": logprobs, "finish_reason": str(reason)})
    kind = "chat.completion" if job.chat else "text_completion"
    return {**_head(job, kind), "choices": choices, "usage": usage}


def _message(answer: Answer) -> dict[str, Any]:
    """What an assistant says: keys that only some answers have are left out of the others."""
    calls = answer.calls
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.content or (None if calls else ""),
        "refusal": None,
    }
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _call(call: CallDelta) -> dict[str, Any]:
    """A call, or what a chunk adds to one."""
    function: dict[str, Any] = {"arguments": call.arguments}
    if call.name is None:
        return {"function": function}
    return {"id": call.id, "type": "function", "function": {"name": call.name, **function}}


class ChunkWriter:
    """The server-sent events of a chat or completion stream."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._offsets = [0] * len(job.requests)  # characters of the tokens told so far

    def opening(self) -> bytes:
        """The role of each chat choice."""
        if not self._job.chat:
            return b""
        role = {"role": "assistant", "content": ""}
        return b"".join(sse(_chunk(self._job, index, role, None)) for index in range(len(self._job.requests)))

    def event(self, event: ChoiceEvent) -> bytes:
        """Text and end are two chunks, as OpenAI sends them; nothing while text is held back."""
        chunks = b""
        content = self._content(event.delta)
        if content or event.tokens or event.speculation is not None:
            logprobs = _logprobs(self._job, event.tokens, self._offsets[event.index])
            self._offsets[event.index] += sum(len(one.token.text) for one in event.tokens)
            chunk = _chunk(self._job, event.index, content, None, logprobs)
            if event.speculation is not None:
                chunk["choices"][0]["speculation"] = event.speculation
            chunks += sse(chunk)
        if event.finish_reason is not None:
            nothing: dict[str, Any] | str = {} if self._job.chat else ""
            chunks += sse(_chunk(self._job, event.index, nothing, event.finish_reason))
        return chunks

    def closing(self, usage: dict[str, Any]) -> bytes:
        return (sse(usage_chunk(self._job, usage)) if self._job.include_usage else b"") + DONE

    def failure(self, error: dict[str, Any]) -> bytes:
        return sse(error) + DONE

    def _content(self, delta: AnswerDelta) -> dict[str, Any] | str:
        if not self._job.chat:
            return delta.content
        content: dict[str, Any] = {}
        if delta.reasoning:
            content["reasoning_content"] = delta.reasoning
        if delta.content:
            content["content"] = delta.content
        if delta.calls:
            content["tool_calls"] = [{"index": call.index, **_call(call)} for call in delta.calls]
        return content


def usage_chunk(job: Job, usage: dict[str, Any]) -> dict[str, Any]:
    """The last chunk under `stream_options.include_usage`."""
    return {**_head(job, _chunk_kind(job)), "choices": [], "usage": usage}


def model_body(model: ServedModel, created: int, adapter: AdapterRef | None = None) -> dict[str, Any]:
    """`GET /v1/models/{id}`. An adapter is a model whose parent is the one it changes, as in vLLM."""
    return {
        "id": model.id if adapter is None else adapter.name,
        "object": "model",
        "created": created,
        "owned_by": "dspark-ray",
        "parent": None if adapter is None else model.id,
        "max_model_len": model.max_model_len,
    }


def _logprobs(job: Job, tokens: Sequence[ShownToken], offset: int = 0) -> dict[str, Any] | None:
    """In the shape of the route; None where they were not asked for."""
    if not job.logprobs:
        return None
    return chat_logprobs(tokens) if job.chat else completion_logprobs(tokens, offset)


def _chunk(
    job: Job,
    index: int,
    content: dict[str, Any] | str,
    reason: FinishReason | None,
    logprobs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    choice = {
        "index": index,
        "delta" if job.chat else "text": content,
        "logprobs": logprobs,
        "finish_reason": None if reason is None else str(reason),
    }
    chunk = {**_head(job, _chunk_kind(job)), "choices": [choice]}
    if job.include_usage:
        chunk["usage"] = None
    return chunk


def _chunk_kind(job: Job) -> str:
    return "chat.completion.chunk" if job.chat else "text_completion"


def _head(job: Job, kind: str) -> dict[str, Any]:
    return {"id": job.id, "object": kind, "created": job.created, "model": job.model}
