"""Sequential temperature scaling: a temperature and an offset per block position, fitted left to right.

What the scheduler ranks and sums is survival a_k = Π_{i≤k} c_i, so that is what is calibrated, with
c_k = σ(logit_k / T_k + b_k): for k = 1..γ a one-dimensional grid search for T_k, with the earlier positions
already fixed (DSpark paper, "Calibration"), and for each T_k the offset b_k under which mean survival is the
share that survived. Both keep the order of confidences within a position. Two things differ from the paper:

- The offset. Blocks begin where the last draft ended, which is where a text is hard to foretell, so a head
  that learnt at all places of a text says too much, by about the same number of logits at all scores. A
  temperature turns logits around 0 and cannot take that away.
- The search looks at the log loss and keeps the temperature nearest 1 that is not clearly worse than the
  best. The calibration error itself is flat and noisy where few blocks survive; its minimum is then anywhere,
  and since survival multiplies positions, a wild temperature costs order between blocks (figures: LOG.md).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64Array = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

# 1 in the middle, 0.25 to 4, 7% apart: losses differ by less than their noise in between.
DEFAULT_GRID: Float64Array = np.geomspace(0.25, 4.0, 41)
CLEARLY_WORSE = 2.0  # standard errors of the difference
MIN_SURVIVORS = 100  # a position where fewer blocks survived gets an offset alone
_OFFSET_RIDGE = 1.0  # pull of an offset towards 0, in blocks: hardly any outcomes, hardly any offset
_MAX_OFFSET = 10.0
_HALVINGS = 18
_MAX_EXPONENT = 60.0
_CLIP = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """From logits to confidences, position by position; increasing in each logit."""

    temperatures: Float64Array  # [γ] above 0
    offsets: Float64Array  # [γ]

    @classmethod
    def identity(cls, block_size: int) -> "Scaling":
        """The head's own confidences."""
        return cls(np.ones(block_size), np.zeros(block_size))

    def confidences(self, logits: ArrayLike) -> Float64Array:
        """σ(logit_k / T_k + b_k). logits [..., γ] → [..., γ]"""
        return _sigmoid(np.asarray(logits, dtype=np.float64) / self.temperatures + self.offsets)


def survival_outcomes(
    num_accepted: ArrayLike, num_verified: ArrayLike, block: int
) -> tuple[BoolArray, BoolArray]:
    """What is known of each position of each block. num_accepted [N], num_verified [N] → two of [N, γ] bool

    The first: positions 1..k were all accepted. The second: that is known, because the position was
    verified or one before it was rejected. Past the verified tokens of a block without a rejection, no.
    """
    position = np.arange(1, block + 1)[None, :]
    accepted, verified = np.asarray(num_accepted)[:, None], np.asarray(num_verified)[:, None]
    return position <= accepted, (position <= verified) | (accepted < verified)


def fit_scaling(
    logits: ArrayLike,
    num_accepted: ArrayLike,
    num_verified: ArrayLike,
    grid: Float64Array = DEFAULT_GRID,
    min_survivors: int = MIN_SURVIVORS,
) -> Scaling:
    """The scaling of one acceptance rule.

    logits [N, γ] of the confidence head, num_accepted [N] and num_verified [N] tokens of the same blocks,
    under that rule. Collect them with full verification: where a budget decided what was verified, the
    blocks whose outcome is known are not a fair sample. A position without any known outcome keeps T = 1 and
    no offset.
    """
    scores = np.asarray(logits, dtype=np.float64)
    assert scores.ndim == 2, "one row of logits for each block"
    assert np.isfinite(scores).all(), "logits are finite"
    survived, known = survival_outcomes(num_accepted, num_verified, scores.shape[1])
    by_distance = grid[np.argsort(np.abs(np.log(grid)), kind="stable")]
    before = np.ones(len(scores))  # Π of the positions already fitted
    fitted = Scaling.identity(scores.shape[1])
    for k in range(scores.shape[1]):
        rows = known[:, k]
        if rows.any():
            outcomes = survived[rows, k].astype(np.float64)
            candidates = by_distance if outcomes.sum() >= min_survivors else np.ones(1)
            offsets, survival = _with_offsets(before[rows], scores[rows, k], candidates, outcomes)
            chosen = _nearest_good(survival, outcomes)
            fitted.temperatures[k], fitted.offsets[k] = candidates[chosen], offsets[chosen]
        before = before * _sigmoid(scores[:, k] / fitted.temperatures[k] + fitted.offsets[k])
    return fitted


def _with_offsets(
    before: Float64Array, scores: Float64Array, temperatures: Float64Array, outcomes: Float64Array
) -> tuple[Float64Array, Float64Array]:
    """For each temperature the offset b at which Σ outcomes = Σ before·σ(score / T + b) + ridge·b, by
    halving, and the survivals. before [N], scores [N], temperatures [G], outcomes [N] → [G], [N, G]"""
    odds_against = np.exp(-np.clip(scores[:, None] / temperatures, -_MAX_EXPONENT, _MAX_EXPONENT))
    low, high = np.full(len(temperatures), -_MAX_OFFSET), np.full(len(temperatures), _MAX_OFFSET)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        expected = before @ (1.0 / (1.0 + odds_against * np.exp(-middle))) + _OFFSET_RIDGE * middle
        too_low = expected < outcomes.sum()
        low, high = np.where(too_low, middle, low), np.where(too_low, high, middle)
    offsets = (low + high) / 2
    return offsets, before[:, None] / (1.0 + odds_against * np.exp(-offsets))


def _nearest_good(survival: Float64Array, outcomes: Float64Array) -> int:
    """The first column whose log loss is not clearly above the least one. survival [N, G], outcomes [N]"""
    chances = np.where(outcomes[:, None] > 0, survival, 1.0 - survival)
    losses = -np.log(np.maximum(chances, _CLIP))
    above = losses - losses[:, [int(np.argmin(losses.mean(axis=0)))]]
    noise = above.std(axis=0) / np.sqrt(len(outcomes))
    return int(np.argmax(above.mean(axis=0) <= CLEARLY_WORSE * noise))


def _sigmoid(x: Float64Array) -> Float64Array:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)), dtype=np.float64)  # overflows nowhere
