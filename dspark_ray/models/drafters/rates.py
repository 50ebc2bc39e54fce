"""Chances of acceptance learnt from what became of past drafts, for drafters without a confidence head."""

from collections.abc import Sequence

import numpy as np

from dspark_ray.core.types import FloatArray
from dspark_ray.models.drafters.base import Outcome


class AcceptanceRates:
    """Live conditional acceptance per position: Beta-smoothed counts that forget slowly."""

    def __init__(self, num_draft_tokens: int, prior: float = 0.9, strength: float = 4.0) -> None:
        # Optimistic, so that an unknown drafter is tried: what is never verified is never learnt.
        self._accepted = np.full(num_draft_tokens, prior * strength)
        self._tried = np.full(num_draft_tokens, strength)
        self._keep = 0.998

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Position k was tried iff all before it were accepted and it was verified."""
        for outcome in outcomes:
            tried = min(outcome.num_accepted + 1, outcome.num_verified)
            if tried:
                self._accepted[:tried] *= self._keep
                self._tried[:tried] *= self._keep
                self._accepted[: outcome.num_accepted] += 1
                self._tried[:tried] += 1

    @property
    def rates(self) -> FloatArray:
        """[γ] in (0, 1)."""
        return (self._accepted / self._tried).astype(np.float32)
