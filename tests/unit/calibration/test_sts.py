"""Sequential temperature scaling against a search in plain loops, and on data with known temperatures."""

import math

import numpy as np
import pytest

from dspark_ray.calibration.reliability import auroc, ece
from dspark_ray.calibration.sts import DEFAULT_GRID, fit_temperatures, scaled_confidences, survival_outcomes


def simulate(
    rng: np.random.Generator, num_blocks: int, true_temperatures: list[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Logits that are off by the given temperatures, and how many tokens of each block were accepted."""
    logits = rng.normal(1.0, 2.0, size=(num_blocks, len(true_temperatures)))
    kept = rng.random(logits.shape) < scaled_confidences(logits, true_temperatures)
    return logits, np.cumprod(kept, axis=1).sum(axis=1)


def brute_force(
    logits: np.ndarray, accepted: np.ndarray, verified: np.ndarray, grid: list[float]
) -> list[float]:
    """The same search, a block and a temperature at a time."""
    fitted: list[float] = []
    for k in range(logits.shape[1]):
        best = (math.inf, math.inf, 1.0)
        for temperature in grid:
            predicted, outcome = [], []
            for row, num_accepted, num_verified in zip(logits, accepted, verified, strict=True):
                if k + 1 > num_verified and num_accepted >= num_verified:
                    continue
                chance = 1.0
                for logit, t in zip(row, [*fitted, temperature], strict=False):
                    chance *= 1.0 / (1.0 + math.exp(-logit / t))
                predicted.append(chance)
                outcome.append(1.0 if num_accepted > k else 0.0)
            if predicted:
                error = round(ece(predicted, outcome), 12)
                best = min(best, (error, abs(math.log(temperature)), temperature))
        fitted.append(best[2])
    return fitted


def test_fit_equals_a_search_in_loops():
    rng = np.random.default_rng(0)
    grid = [0.5, 0.8, 1.0, 1.3, 2.0, 3.0]
    for _ in range(5):
        logits, accepted = simulate(rng, 60, [2.0, 0.6, 1.5])
        verified = np.maximum(rng.integers(1, 4, size=60), np.minimum(accepted + 1, 3))
        accepted = np.minimum(accepted, verified)
        got = fit_temperatures(logits, accepted, verified, np.array(grid))
        assert got.tolist() == brute_force(logits, accepted, verified, grid)


def test_known_temperatures_are_found_and_errors_fall():
    rng = np.random.default_rng(1)
    truth = [2.0, 0.6, 1.5]
    logits, accepted = simulate(rng, 20_000, truth)
    fitted = fit_temperatures(logits, accepted, np.full(len(logits), 3))
    np.testing.assert_allclose(fitted[:2], truth[:2], rtol=0.15)
    held_out, held_out_accepted = simulate(rng, 20_000, truth)
    before = np.cumprod(scaled_confidences(held_out, np.ones(3)), axis=1)
    after = np.cumprod(scaled_confidences(held_out, fitted), axis=1)
    for k in range(3):
        outcome = (held_out_accepted > k).astype(float)
        assert ece(after[:, k], outcome) < 0.012 < ece(before[:, k], outcome)


def test_the_order_within_a_position_is_kept():
    rng = np.random.default_rng(2)
    logits, accepted = simulate(rng, 500, [3.0])
    fitted = fit_temperatures(logits, accepted, np.ones(500))
    outcome = (accepted > 0).astype(float)
    before, after = scaled_confidences(logits, [1.0])[:, 0], scaled_confidences(logits, fitted)[:, 0]
    assert np.argsort(before).tolist() == np.argsort(after).tolist()
    assert auroc(before, outcome) == auroc(after, outcome)


def test_calibrated_logits_stay_about_as_they_are():
    logits, accepted = simulate(np.random.default_rng(3), 20_000, [1.0, 1.0])
    np.testing.assert_allclose(fit_temperatures(logits, accepted, np.full(20_000, 2)), 1.0, rtol=0.15)


def test_what_is_known_of_a_block():
    survived, known = survival_outcomes([2, 2, 0, 3], [2, 3, 0, 3], 3)
    assert survived.tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 0], [1, 1, 1]]
    assert known.tolist() == [[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 1, 1]]


def test_a_position_never_seen_keeps_one():
    fitted = fit_temperatures(np.full((4, 2), 3.0), [1, 1, 1, 1], [1, 1, 1, 1])
    assert fitted[1] == 1.0
    assert fit_temperatures(np.zeros((0, 3)), [], []).tolist() == [1.0, 1.0, 1.0]


def test_the_grid_contains_one_and_extreme_logits_do_not_overflow():
    assert np.isclose(DEFAULT_GRID, 1.0).any()
    assert scaled_confidences([[1e6, -1e6]], [0.1, 0.1]).tolist() == [[1.0, 0.0]]


def test_nan_logits_are_a_bug_of_the_caller():
    with pytest.raises(AssertionError):
        fit_temperatures([[np.nan]], [0], [1])
