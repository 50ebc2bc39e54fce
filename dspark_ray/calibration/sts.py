"""Sequential temperature scaling: one temperature per block position, fitted left to right.

What the scheduler ranks and sums is survival a_k = Π_{i≤k} c_i, so that is what is calibrated: for
k = 1..γ a one-dimensional grid search for the T_k that minimises the expected calibration error of
Π_{i≤k} σ(logit_i / T_i), with T_1..T_{k−1} already fixed (DSpark paper, "Calibration"). Dividing a logit by a
positive number keeps the order of confidences within a position.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_ray.calibration.reliability import NUM_BINS, ece_columns

Float64Array = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

# 1 in the middle, 0.1 to 10, about 2.3% apart.
DEFAULT_GRID: Float64Array = np.geomspace(0.1, 10.0, 201)


def scaled_confidences(logits: ArrayLike, temperatures: ArrayLike) -> Float64Array:
    """σ(logit_k / T_k). logits [..., γ], temperatures [γ] → [..., γ]"""
    return _sigmoid(np.asarray(logits, dtype=np.float64) / np.asarray(temperatures, dtype=np.float64))


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


def fit_temperatures(
    logits: ArrayLike,
    num_accepted: ArrayLike,
    num_verified: ArrayLike,
    grid: Float64Array = DEFAULT_GRID,
    num_bins: int = NUM_BINS,
) -> Float64Array:
    """The temperatures of one acceptance rule. → [γ]

    logits [N, γ] of the confidence head, num_accepted [N] and num_verified [N] tokens of the same blocks,
    under that rule. Collect them with full verification: where a budget decided what was verified, the
    blocks whose outcome is known are not a fair sample. Of equal grid points the one nearest 1 is taken; a
    position without any known outcome keeps T = 1.
    """
    scores = np.asarray(logits, dtype=np.float64)
    assert scores.ndim == 2, "one row of logits for each block"
    assert np.isfinite(scores).all(), "logits are finite"
    survived, known = survival_outcomes(num_accepted, num_verified, scores.shape[1])
    by_distance = grid[np.argsort(np.abs(np.log(grid)), kind="stable")]
    before = np.ones(len(scores))  # Π of the positions already fitted
    fitted = np.ones(scores.shape[1])
    for k in range(scores.shape[1]):
        rows = known[:, k]
        if rows.any():
            candidates = before[rows, None] * _sigmoid(scores[rows, k, None] / by_distance[None, :])
            error = ece_columns(candidates, survived[rows, k].astype(np.float64), num_bins)
            fitted[k] = by_distance[int(np.argmin(error))]
        before = before * _sigmoid(scores[:, k] / fitted[k])
    return fitted


def _sigmoid(x: Float64Array) -> Float64Array:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)), dtype=np.float64)  # overflows nowhere
