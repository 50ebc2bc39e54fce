"""How far predicted probabilities are from what happened: ECE, AUROC, Brier score, reliability bins.

Predictions are survivals or confidences in [0, 1]; outcomes are 0 or 1 (ECE, Brier and the bins also take
soft labels in between). NaN in either is an error of the caller's, and asserted.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64Array = NDArray[np.float64]

NUM_BINS = 15


@dataclass(frozen=True, slots=True)
class ReliabilityBins:
    """A reliability diagram: equal-width bins over [0, 1]; the means of an empty bin are NaN."""

    edges: Float64Array  # [num_bins + 1]
    count: NDArray[np.int64]  # [num_bins]
    mean_predicted: Float64Array  # [num_bins]
    mean_outcome: Float64Array  # [num_bins]


def reliability_bins(predicted: ArrayLike, outcome: ArrayLike, num_bins: int = NUM_BINS) -> ReliabilityBins:
    """predicted [N], outcome [N] → the diagram's points."""
    probabilities, labels = _checked(predicted, outcome)
    place = _bin_of(probabilities, num_bins)
    count = np.bincount(place, minlength=num_bins)
    with np.errstate(invalid="ignore"):
        mean_predicted = np.bincount(place, weights=probabilities, minlength=num_bins) / count
        mean_outcome = np.bincount(place, weights=labels, minlength=num_bins) / count
    return ReliabilityBins(np.linspace(0.0, 1.0, num_bins + 1), count, mean_predicted, mean_outcome)


def ece(predicted: ArrayLike, outcome: ArrayLike, num_bins: int = NUM_BINS) -> float:
    """Expected calibration error Σ_b (n_b / N)·|mean predicted − mean outcome|; 0 if empty. [N], [N]"""
    probabilities, labels = _checked(predicted, outcome)
    if not len(labels):
        return 0.0
    gap = np.bincount(_bin_of(probabilities, num_bins), weights=probabilities - labels)
    return float(np.abs(gap).sum() / len(labels))


def brier(predicted: ArrayLike, outcome: ArrayLike) -> float:
    """Mean squared error of the probabilities. [N], [N] → [0, 1]; NaN if empty"""
    probabilities, labels = _checked(predicted, outcome)
    return float(np.mean((probabilities - labels) ** 2)) if len(labels) else float("nan")


def auroc(predicted: ArrayLike, outcome: ArrayLike) -> float:
    """The chance that a kept token scores above a rejected one, ties counted half. [N], [N] → [0, 1]

    The Mann-Whitney statistic from mean ranks; NaN if all outcomes are equal.
    """
    probabilities, labels = _checked(predicted, outcome)
    positive = labels > 0.5
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    if num_positive == 0 or num_negative == 0:
        return float("nan")
    _, place, count = np.unique(probabilities, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(count) - (count - 1) / 2.0  # ranks from 1, ties share theirs
    rank_sum = float(mean_rank[place][positive].sum())
    return (rank_sum - num_positive * (num_positive + 1) / 2.0) / (num_positive * num_negative)


def _bin_of(probabilities: Float64Array, num_bins: int) -> NDArray[np.int64]:
    """Bin b holds [b / num_bins, (b + 1) / num_bins), the last one 1 as well."""
    return np.minimum((probabilities * num_bins).astype(np.int64), num_bins - 1)


def _checked(predicted: ArrayLike, outcome: ArrayLike) -> tuple[Float64Array, Float64Array]:
    probabilities = np.asarray(predicted, dtype=np.float64)
    labels = np.asarray(outcome, dtype=np.float64)
    assert probabilities.ndim == 1, "predictions are one row"
    assert probabilities.shape == labels.shape, "one outcome for each prediction"
    assert np.all((probabilities >= 0) & (probabilities <= 1)), "predictions are probabilities"
    assert np.all((labels >= 0) & (labels <= 1)), "outcomes are 0, 1 or in between"
    return probabilities, labels
