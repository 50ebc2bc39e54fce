"""Live corrections: measured over predicted step time by size of step, accepted over claimed tokens."""

import numpy as np
from numpy.typing import NDArray

from dspark_ray.core.types import IntArray

_NUM_BUCKETS = 24  # bucket b holds steps of 2^(b-1) < rows ≤ 2^b
_SMOOTHING = 0.1  # weight of a new step once a bucket is warm
_CLIP = 0.7  # most that one step may differ from the estimate, in log units: a factor of two
_PRIOR_STEPS = 8.0  # a bucket seen this often counts half, the mean over all sizes the other half
_FADE = 0.999  # evidence kept per step: a size not run for thousands of steps returns to that mean
_CLAIMS_KEPT = 0.998  # of the evidence about claims, per step
_PRIOR_CLAIMS = 32.0  # claimed tokens' worth of belief in the calibration
_LEAST_FACTOR, _MOST_FACTOR = 0.5, 1.25


class OnlineCorrection:
    """A factor per power-of-two size, shrunk to the factor of all sizes together.

    An average of log ratios: half as fast and twice as fast weigh the same. One step may move it by a
    factor of two at most before smoothing, so a stall of the machine passes almost unseen while a lasting
    change is followed within some tens of steps. Sizes that are not run forget slowly, or a size
    that was once slow would never be tried again.
    """

    def __init__(self) -> None:
        self._log_ratio = np.zeros(_NUM_BUCKETS)
        self._steps = np.zeros(_NUM_BUCKETS)
        self._global_log_ratio = 0.0
        self._global_steps = 0.0

    @property
    def is_known(self) -> bool:
        """Whether a step was ever seen."""
        return self._global_steps > 0

    def update(self, rows: int, predicted_ms: float, measured_ms: float) -> None:
        """One step of `rows` rows: `predicted_ms` is the uncorrected table's figure. Nonsense is ignored."""
        if not (rows >= 1 and 0 < predicted_ms < np.inf and 0 < measured_ms < np.inf):
            return
        observed = float(np.log(measured_ms / predicted_ms))
        bucket = _bucket_of(rows)
        self._global_log_ratio = _blend(self._global_log_ratio, self._global_steps, observed)
        self._log_ratio[bucket] = _blend(float(self._log_ratio[bucket]), float(self._steps[bucket]), observed)
        self._steps *= _FADE
        self._steps[bucket] += 1.0
        self._global_steps += 1.0

    def factor(self, rows: IntArray) -> NDArray[np.float64]:
        """What to multiply the table's cost with. rows [n] → [n]; 1 before the first step.

        Linear in log2(rows) between the middles of the buckets, so that the cost curve does not jump
        where nothing in the machine does.
        """
        own = self._steps / (self._steps + _PRIOR_STEPS)
        shrunk = own * self._log_ratio + (1.0 - own) * self._global_log_ratio
        place = np.log2(np.maximum(np.asarray(rows, dtype=np.float64), 1.0))
        middles = np.arange(_NUM_BUCKETS) - np.where(np.arange(_NUM_BUCKETS) > 1, 0.5, 0.0)
        return np.asarray(np.exp(np.interp(place, middles, shrunk)), dtype=np.float64)


class ClaimCorrection:
    """What claimed survivals have lately been worth: accepted draft tokens over those that scores promised.

    Confidences are calibrated on texts of the drafter's training; on others they are off, mostly alike at all
    heights, and a budget is a comparison of claims with costs that are corrected. Past outcomes only, so that
    nothing that is drafted decides whether it is verified. Evidence fades: where too low a factor would leave
    nothing to be verified, and nothing to learn from, it returns to 1.
    """

    def __init__(self) -> None:
        self._claimed = self._accepted = 0.0

    def note(self, claimed: float, accepted: int) -> None:
        """A step's verified tokens: Σ survival, and how many were accepted. Called once a step."""
        self._claimed = _CLAIMS_KEPT * self._claimed + claimed
        self._accepted = _CLAIMS_KEPT * self._accepted + accepted

    @property
    def factor(self) -> float:
        """What to multiply survivals with that are compared with costs; 1 before the first step."""
        worth = (self._accepted + _PRIOR_CLAIMS) / (self._claimed + _PRIOR_CLAIMS)
        return min(max(worth, _LEAST_FACTOR), _MOST_FACTOR)


def _bucket_of(rows: int) -> int:
    return min((rows - 1).bit_length(), _NUM_BUCKETS - 1)


def _blend(estimate: float, steps: float, observed: float) -> float:
    """A running mean at first, an exponential one later; the first step is taken as it is, but clipped."""
    bounded = min(max(observed, estimate - _CLIP), estimate + _CLIP)
    return estimate + max(_SMOOTHING, 1.0 / (steps + 1.0)) * (bounded - estimate)
