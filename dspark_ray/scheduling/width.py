"""How many tokens to draft: no more than what has lately been worth verifying.

A block drafter's time grows with its block once several requests are drafted together (every slot is a row
of the backbone and of the LM head), and slots that are never verified buy nothing. The width comes from
the lengths of past steps only, so it knows nothing of the block it shapes (see `lengths.py`, "Losslessness").
"""

import numpy as np

from dspark_ray.core.types import IntArray

_KEEP = 0.95  # of the averages, a step: they look some twenty steps back
_WORTH_DRAFTING = 0.04  # share of the drafts in which a position must be verified to be drafted again


class DraftWidth:
    """Averages, per position, of how many drafts were verified that far; one position more is drafted.

    The spare position is what lets the width grow again. Starts at the full block.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        self._share = np.ones(num_draft_tokens)  # [γ] of the drafts, those verified up to this position

    def note(self, lens: IntArray, max_lens: IntArray) -> None:
        """One step: lens [R] verified, max_lens [R] at hand (0: no draft)."""
        drafted = np.asarray(max_lens) > 0
        if drafted.any():
            verified = np.asarray(lens)[drafted][:, None] > np.arange(len(self._share))
            self._share = _KEEP * self._share + (1.0 - _KEEP) * verified.mean(axis=0)

    def tokens(self) -> int:
        """Tokens to draft for each request, 1..γ."""
        worth = int((self._share >= _WORTH_DRAFTING).sum())
        return min(worth + 1, len(self._share))
