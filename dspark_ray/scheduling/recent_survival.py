"""What drafts have lately been worth: the scores of the last blocks of all requests together."""

import numpy as np

from dspark_ray.core.types import FloatArray

_KEPT_DRAFTS = 96
_FIRST_GUESS = 0.7  # of a confidence, before anything is known


class RecentSurvival:
    """A window over scored drafts, each `delay` steps old when it enters.

    Old enough scores know nothing of the blocks whose budgets they decide (`lengths.py`, "Losslessness").
    """

    def __init__(self, num_draft_tokens: int, delay: int) -> None:
        self._delay = delay
        self._waiting: list[FloatArray] = []
        powers = np.arange(1, num_draft_tokens + 1)
        self._rows: FloatArray = (_FIRST_GUESS**powers)[None, :].astype(np.float32)
        self._mean: FloatArray = self._rows[0]
        self._known = False

    def note(self, scores: FloatArray, width: int) -> None:
        """A step's fresh scores [R, γ], of which the first `width` were drafted."""
        self._waiting.append(scores[:, :width])
        if len(self._waiting) <= self._delay:
            return
        old = self._extended(self._waiting.pop(0))
        self._rows = np.concatenate([self._rows, old])[-_KEPT_DRAFTS:] if self._known else old
        self._mean, self._known = self._rows.mean(axis=0), True

    @property
    def rows(self) -> FloatArray:
        """Survival of recent drafts [K, γ], K ≥ 1."""
        return self._rows

    @property
    def mean(self) -> FloatArray:
        """Their mean [γ]: what to expect of a request with no scores of its own."""
        return self._mean

    def _extended(self, scores: FloatArray) -> FloatArray:
        """Whole blocks: positions that were not drafted fall off as the mean does. [R, w] → [R, γ]"""
        width, gamma = scores.shape[1], len(self._mean)
        if width == gamma:
            return scores
        falls = self._mean[width:] / max(float(self._mean[width - 1]), 1e-6)
        return np.concatenate([scores, scores[:, -1:] * np.minimum(falls, 1.0)], axis=1)
