"""From our sampling parameters to vLLM's: each is mapped, or refused where it would be ignored."""

from dataclasses import fields, replace
from typing import Any

from dspark_ray.core.errors import RequestError
from dspark_ray.core.types import Priority, Request, SamplingParams

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
)


def sampling_arguments(request: Request) -> dict[str, Any]:
    """Keyword arguments for vLLM's `SamplingParams`, for the part of `request` that is still to come.

    Text, and so stop strings, are the ingress' business: vLLM gets and gives tokens. Raises `RequestError`
    for a parameter that has no counterpart here and is not left at its default.
    """
    sampling, num_emitted = request.sampling, len(request.emitted_token_ids)
    _refuse_unmapped(sampling)
    if request.grammar is not None:
        raise RequestError(
            "structured output and tools that must be called are not supported by this server's engine",
            param="response_format",
            code="unsupported_parameter",
        )
    if replace(request.priority, level=0) != Priority():
        raise _unsupported("service_tier")
    if num_emitted and (sampling.presence_penalty or sampling.frequency_penalty):
        # To vLLM the tokens emitted before are prompt, which these two penalties do not count.
        raise RequestError(
            "the replica that ran this request died, and its penalties cannot be continued; send it again",
            status=503,
            code="cannot_resume",
        )
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
        "detokenize": False,
    }


def _refuse_unmapped(sampling: SamplingParams) -> None:
    for field in fields(sampling):
        if field.name in (*_SAME, *_TRANSLATED):
            continue
        if getattr(sampling, field.name) != field.default:
            raise _unsupported(field.name)


def _unsupported(name: str) -> RequestError:
    message = f"parameter '{name}' is not supported by this server's engine; leave it out"
    return RequestError(message, param=name, code="unsupported_parameter")
