"""From our sampling parameters to vLLM's: each is mapped, or refused where it would be ignored."""

from dataclasses import fields
from typing import Any

from dspark_ray.core.errors import RequestError
from dspark_ray.core.types import Request, SamplingParams

# Same name and meaning in vLLM.
_SAME = (
    "top_p",
    "min_p",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_TRANSLATED = (
    "temperature",
    "seed",
    "choice",
    "shared_noise",  # vLLM has the rejection rule only: a seed's text repeats while drafts and load do
    "top_k",
    "max_tokens",
    "min_tokens",
    "stop_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logprobs",
    "prompt_logprobs",
    "max_draft_tokens",
)


def sampling_arguments(request: Request, num_draft_tokens: int) -> dict[str, Any]:
    """Keyword arguments for vLLM's `SamplingParams`, for the part of `request` that is still to come.

    Text, and so stop strings, are the ingress' business: vLLM gets and gives tokens. Grammar and bad words
    are set by the client, in vLLM's own types. num_draft_tokens: what is verified of a request at most.
    Raises `RequestError` for a parameter that has no counterpart here and is not left at its default.
    """
    sampling, num_emitted = request.sampling, len(request.emitted_token_ids)
    _refuse_unmapped(sampling)
    if sampling.max_draft_tokens is not None and sampling.max_draft_tokens < num_draft_tokens:
        raise _unsupported("speculation", "vLLM drafts for all requests alike")
    if request.priority.target_tokens_per_s is not None:
        raise _unsupported("target_tokens_per_second", "vLLM owes no request a speed")
    if num_emitted:
        _refuse_resumption(request)
    return {name: getattr(sampling, name) for name in _SAME} | {
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        # vLLM's seeds know no choices.
        "seed": None if sampling.seed is None else sampling.seed + sampling.choice,
        "top_k": sampling.top_k or 0,
        "max_tokens": sampling.max_tokens - num_emitted,
        "min_tokens": max(0, sampling.min_tokens - num_emitted),
        "stop_token_ids": list(sampling.stop_token_ids),
        "logit_bias": dict(sampling.logit_bias) or None,
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        "logprobs": sampling.logprobs,
        # A resumed request had its prompt's sent.
        "prompt_logprobs": None if num_emitted else sampling.prompt_logprobs,
        "detokenize": False,
    }


def _refuse_resumption(request: Request) -> None:
    """To vLLM the tokens emitted before are prompt: what looks at output begins anew, and would be wrong."""
    sampling = request.sampling
    begins_anew = {
        "penalties": bool(sampling.presence_penalty or sampling.frequency_penalty),
        "bad_words": any(len(word) > 1 for word in sampling.bad_words),
        "the constraint of its text": request.grammar is not None,
    }
    if named := ", ".join(name for name, is_used in begins_anew.items() if is_used):
        raise RequestError(
            f"the replica that ran this request died, and it cannot be continued ({named}); send it again",
            status=503,
            code="cannot_resume",
        )


def _refuse_unmapped(sampling: SamplingParams) -> None:
    for field in fields(sampling):
        if field.name in (*_SAME, *_TRANSLATED):
            continue
        if getattr(sampling, field.name) != field.default:
            raise _unsupported(field.name, "vLLM has no such parameter")


def _unsupported(name: str, reason: str) -> RequestError:
    message = f"parameter '{name}' is not supported by this server's engine: {reason}; leave it out"
    return RequestError(message, param=name, code="unsupported_parameter")
