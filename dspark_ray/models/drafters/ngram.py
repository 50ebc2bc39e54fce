"""Prompt look-up: the continuation of the latest earlier occurrence of the text's last few tokens.

The free baseline (no weights, no forward pass). Its confidences are the live acceptance rate of each
position, learnt from past outcomes only.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from dspark_ray.models.drafters.base import (
    DRAFTERS,
    ContextRows,
    DraftBlock,
    DrafterContext,
    DraftRequest,
    Outcome,
)
from dspark_ray.models.drafters.rates import AcceptanceRates


@DRAFTERS.register("ngram")
class NgramDrafter:
    """Looks up the longest suffix of `ngram_max` … `ngram_min` tokens."""

    taps: tuple[int, ...] = ()
    vocab_map: Tensor | None = None
    context_digests: tuple[str, ...] = ()

    def __init__(self, context: DrafterContext) -> None:
        self.num_draft_tokens = context.num_draft_tokens
        self._shortest, self._longest = context.ngram_min, context.ngram_max
        self._rates = AcceptanceRates(context.num_draft_tokens)

    def commit(self, rows: ContextRows) -> None:
        """Nothing to keep: the tokens are the context."""

    def propose(self, requests: Sequence[DraftRequest]) -> DraftBlock:
        wanted = len(requests[0].uniforms)
        tokens = [self._continuation(request.token_ids, wanted) for request in requests]
        confidences = np.tile(self._rates.rates[:wanted], (len(requests), 1))
        for row, proposal in enumerate(tokens):
            confidences[row, len(proposal) :] = 0.0
        return DraftBlock(tokens, confidences, [None] * len(tokens))

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self._rates.observe(outcomes)

    def wants_full_verification(self) -> bool:
        return False

    def describe(self) -> str:
        return f"ngram look-up of {self._shortest}-{self._longest} tokens, γ={self.num_draft_tokens}"

    def _continuation(self, token_ids: Sequence[int], wanted: int) -> list[int]:
        history = np.asarray(token_ids, dtype=np.int64)
        for length in range(self._longest, self._shortest - 1, -1):
            if len(history) <= length:
                continue
            windows = np.lib.stride_tricks.sliding_window_view(history[:-1], length)
            matches = np.flatnonzero((windows == history[-length:]).all(axis=1))
            if len(matches):
                start = int(matches[-1]) + length
                return history[start : start + wanted].tolist()
        return []
