"""Response bodies and stream chunks in OpenAI's shapes, as plain dicts."""

import json
from collections.abc import Sequence
from typing import Any

from dspark_ray.core.types import FinishReason, RequestUsage
from dspark_ray.serving.parsing import Job

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
    job: Job, texts: Sequence[str], reasons: Sequence[FinishReason], usage: dict[str, Any]
) -> dict[str, Any]:
    """The answer of a request that does not stream."""
    choices = []
    for index, (text, reason) in enumerate(zip(texts, reasons, strict=True)):
        content: dict[str, Any] = {"text": text}
        if job.chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choices.append({"index": index, **content, "logprobs": None, "finish_reason": str(reason)})
    kind = "chat.completion" if job.chat else "text_completion"
    return {**_head(job, kind), "choices": choices, "usage": usage}


def role_chunk(job: Job, index: int) -> dict[str, Any]:
    """The first chunk of a chat choice."""
    return _chunk(job, index, {"role": "assistant", "content": ""}, None)


def text_chunk(job: Job, index: int, text: str, reason: FinishReason | None) -> dict[str, Any]:
    """New text, the end of a choice, or both (`/v1/completions`)."""
    if job.chat:
        return _chunk(job, index, {"content": text} if text else {}, reason)
    return _chunk(job, index, text, reason)


def usage_chunk(job: Job, usage: dict[str, Any]) -> dict[str, Any]:
    """The last chunk under `stream_options.include_usage`."""
    return {**_head(job, _chunk_kind(job)), "choices": [], "usage": usage}


def models_body(model_id: str, created: int, max_model_len: int) -> dict[str, Any]:
    """`GET /v1/models`."""
    return {"object": "list", "data": [model_body(model_id, created, max_model_len)]}


def model_body(model_id: str, created: int, max_model_len: int) -> dict[str, Any]:
    """`GET /v1/models/{id}`."""
    return {
        "id": model_id,
        "object": "model",
        "created": created,
        "owned_by": "dspark-ray",
        "max_model_len": max_model_len,
    }


def _chunk(
    job: Job, index: int, content: dict[str, Any] | str, reason: FinishReason | None
) -> dict[str, Any]:
    choice = {
        "index": index,
        "delta" if job.chat else "text": content,
        "logprobs": None,
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
