"""Calibration figures on hand-computed answers."""

import numpy as np
import pytest

from dspark_ray.calibration.reliability import auroc, brier, ece, reliability_bins


def test_ece_by_hand():
    # Bins of width .5: {.1, .3} with outcomes 0, 1 and {.8, .9} with 1, 1.
    predicted, outcome = [0.1, 0.3, 0.8, 0.9], [0, 1, 1, 1]
    assert ece(predicted, outcome, num_bins=2) == pytest.approx(0.5 * abs(0.2 - 0.5) + 0.5 * abs(0.85 - 1.0))


def test_ece_of_the_edges_and_of_nothing():
    assert ece([0.0, 1.0], [0, 1]) == 0.0
    assert ece([1.0, 1.0], [0, 1]) == 0.5
    assert ece([], []) == 0.0


def test_bins():
    bins = reliability_bins([0.1, 0.3, 0.8], [0, 1, 1], num_bins=4)
    assert bins.edges.tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert bins.count.tolist() == [1, 1, 0, 1]
    np.testing.assert_allclose(bins.mean_predicted, [0.1, 0.3, np.nan, 0.8])
    np.testing.assert_allclose(bins.mean_outcome, [0.0, 1.0, np.nan, 1.0])


def test_auroc_counts_ordered_pairs_and_halves_ties():
    rng = np.random.default_rng(1)
    predicted, outcome = rng.integers(0, 5, 40) / 5, rng.random(40) < 0.5
    pairs = [
        1.0 if p > n else 0.5 if p == n else 0.0 for p in predicted[outcome] for n in predicted[~outcome]
    ]
    assert auroc(predicted, outcome.astype(float)) == pytest.approx(np.mean(pairs))


def test_auroc_extremes():
    assert auroc([0.1, 0.9], [0, 1]) == 1.0
    assert auroc([0.9, 0.1], [0, 1]) == 0.0
    assert auroc([0.5, 0.5], [0, 1]) == 0.5
    assert np.isnan(auroc([0.5, 0.5], [1, 1]))


def test_brier():
    assert brier([0.2, 0.9], [0, 1]) == pytest.approx((0.04 + 0.01) / 2)
    assert np.isnan(brier([], []))


@pytest.mark.parametrize("predicted", [[1.5], [-0.1], [float("nan")]])
def test_predictions_must_be_probabilities(predicted):
    with pytest.raises(AssertionError):
        ece(predicted, [1])
