"""Log-probabilities of tokens as the target itself gives them: before temperature, rules and filters."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dspark_ray.core.types import TokenLogprobs

ROWS_AT_ONCE = 64  # of a prompt: a vocabulary's worth of fp32 for each


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """logits [N, V]: row i is the distribution of token i; `num_top` likeliest alternatives each."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1)).squeeze(1).tolist()
    best = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
    return [
        TokenLogprobs(logprob, tuple(zip(ids, values, strict=True)))
        for logprob, ids, values in zip(own, best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def prompt_logprobs(
    hidden: Tensor, logits: Callable[[Tensor], Tensor], next_token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """Of the tokens after some rows of a prompt. hidden [N, H]; `logits` is the target's head."""
    found: list[TokenLogprobs] = []
    for start in range(0, len(next_token_ids), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        found += token_logprobs(logits(hidden[rows]), next_token_ids[rows], num_top)
    return found
