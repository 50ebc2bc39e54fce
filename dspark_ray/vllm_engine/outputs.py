"""vLLM's outputs as ours: tokens, log-probabilities, and what a request has cost."""

from collections.abc import Mapping, Sequence
from typing import Any

from dspark_ray.core.types import FinishReason, Request, RequestOutput, RequestUsage, TokenLogprobs

_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


class OutputReader:
    """One request's outputs, in their order."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._num_read = 0  # tokens of this attempt
        self._num_cached = 0

    def read(self, output: Any) -> RequestOutput:
        """vLLM's `RequestOutput`, with the tokens since the last one."""
        request, completion = self._request, output.outputs[0]
        token_ids = tuple(completion.token_ids)
        self._num_read += len(token_ids)
        self._num_cached = output.num_cached_tokens or self._num_cached
        reason = usage = None
        error = ""
        if completion.finish_reason is not None:
            reason = _FINISH_REASONS.get(completion.finish_reason, FinishReason.ERROR)
            usage = self.usage(self._num_read, completion.spec_decode_metrics)
            if reason is FinishReason.ERROR:
                error = f"vLLM ended it: {completion.finish_reason}"
        sampling = request.sampling
        # The first place of a prompt has none. A resumed request had its prompt's sent.
        wants_prompt = sampling.prompt_logprobs is not None and not request.emitted_token_ids
        prompt = (output.prompt_logprobs or [])[1:] if wants_prompt else []
        return RequestOutput(
            request.request_id,
            token_ids,
            reason,
            usage,
            error,
            logprobs=_logprobs(token_ids, completion.logprobs or (), sampling.logprobs),
            prompt_logprobs=_logprobs(request.prompt_token_ids[1:], prompt, sampling.prompt_logprobs),
        )

    def failed(self, error: Exception) -> RequestOutput:
        """The end of a request that vLLM raised over."""
        reason = f"vLLM failed on it: {type(error).__name__}: {error}"
        usage = self.usage(self._num_read)
        return RequestOutput(self._request.request_id, (), FinishReason.ERROR, usage, reason)

    def usage(self, num_tokens: int, drafts: Any = None) -> RequestUsage:
        """After `num_tokens` of this attempt. drafts: vLLM's `RequestSpecDecodeMetrics`; its histogram counts
        steps by tokens accepted."""
        request = self._request
        num_drafted = accepted = 0
        if drafts is not None:
            num_drafted = drafts.num_draft_tokens
            accepted = sum(tokens * steps for tokens, steps in enumerate(drafts.histogram))
        return RequestUsage(
            prompt_tokens=len(request.prompt_token_ids),
            cached_tokens=min(self._num_cached, len(request.prompt_token_ids)),
            completion_tokens=len(request.emitted_token_ids) + num_tokens,
            drafted_tokens=num_drafted,
            verified_tokens=num_drafted,
            accepted_tokens=accepted,
        )


def _logprobs(
    token_ids: Sequence[int], places: Sequence[Mapping[int, Any]], num_top: int | None
) -> tuple[TokenLogprobs, ...]:
    """places: by token id, vLLM's `Logprob` of the token that stands there and of the likeliest ones."""
    if num_top is None:
        return ()
    found = []
    for token_id, place in zip(token_ids, places, strict=False):
        ranked = sorted((one.rank, other, one.logprob) for other, one in place.items() if one.rank)
        top = tuple((other, logprob) for rank, other, logprob in ranked if rank <= num_top)
        found.append(TokenLogprobs(place[token_id].logprob, top))
    return tuple(found)
