"""Sequential temperature scaling against a search in plain loops, and on data with known temperatures."""

import math

import numpy as np
import pytest

from dspark_ray.calibration.reliability import auroc, ece
from dspark_ray.calibration.sts import (
    CLEARLY_WORSE,
    DEFAULT_GRID,
    Scaling,
    fit_scaling,
    survival_outcomes,
)


def simulate(
    rng: np.random.Generator, num_blocks: int, temperatures: list[float], offsets: list[float] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Logits that are off by the given scaling, and how many tokens of each block were accepted."""
    scaling = Scaling(np.array(temperatures), np.array(offsets or [0.0] * len(temperatures)))
    logits = rng.normal(1.0, 2.0, size=(num_blocks, len(temperatures)))
    kept = rng.random(logits.shape) < scaling.confidences(logits)
    return logits, np.cumprod(kept, axis=1).sum(axis=1)


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def brute_force(
    logits: np.ndarray, accepted: np.ndarray, verified: np.ndarray, grid: list[float]
) -> list[tuple[float, float]]:
    """The same search, a block and a temperature at a time: (T, b) of each position."""
    fitted: list[tuple[float, float]] = []
    for k in range(logits.shape[1]):
        rows, outcomes = [], []
        for row, num_accepted, num_verified in zip(logits, accepted, verified, strict=True):
            if k + 1 > num_verified and num_accepted >= num_verified:
                continue
            before = 1.0
            for logit, (t, b) in zip(row, fitted, strict=False):
                before *= sigmoid(logit / t + b)
            rows.append((before, row[k]))
            outcomes.append(1.0 if num_accepted > k else 0.0)
        if not rows:
            fitted.append((1.0, 0.0))
            continue
        found = []
        for temperature in sorted(grid, key=lambda t: abs(math.log(t))):
            low, high = -10.0, 10.0
            for _ in range(40):
                b = (low + high) / 2
                expected = sum(before * sigmoid(x / temperature + b) for before, x in rows) + b
                low, high = (b, high) if expected < sum(outcomes) else (low, b)
            chances = [before * sigmoid(x / temperature + low) for before, x in rows]
            losses = [-math.log(p if y else 1 - p) for p, y in zip(chances, outcomes, strict=True)]
            found.append((temperature, low, losses))
        best = min(found, key=lambda f: sum(f[2]))[2]
        for temperature, b, losses in found:
            above = [x - y for x, y in zip(losses, best, strict=True)]
            if np.mean(above) <= CLEARLY_WORSE * np.std(above) / math.sqrt(len(above)):
                fitted.append((temperature, b))
                break
    return fitted


def test_fit_equals_a_search_in_loops():
    rng = np.random.default_rng(0)
    grid = [0.3, 0.5, 0.8, 1.0, 1.3, 2.0, 3.0, 5.0]
    found = set()
    for _ in range(5):
        logits, accepted = simulate(rng, 120, [4.0, 0.3, 1.5], [0.5, -0.8, 0.0])
        verified = np.maximum(rng.integers(1, 4, size=120), np.minimum(accepted + 1, 3))
        accepted = np.minimum(accepted, verified)
        got = fit_scaling(logits, accepted, verified, np.array(grid), min_survivors=0)
        expected = brute_force(logits, accepted, verified, grid)
        assert got.temperatures.tolist() == [t for t, _ in expected]
        np.testing.assert_allclose(got.offsets, [b for _, b in expected], atol=1e-3)
        found |= set(got.temperatures.tolist())
    assert len(found) >= 4  # the search had something to choose


def test_a_known_scaling_is_found_and_errors_fall():
    rng = np.random.default_rng(1)
    truth = [2.0, 0.6, 1.5], [-0.7, 0.4, 0.0]
    logits, accepted = simulate(rng, 20_000, *truth)
    fitted = fit_scaling(logits, accepted, np.full(len(logits), 3))
    np.testing.assert_allclose(fitted.temperatures, truth[0], rtol=0.2)
    np.testing.assert_allclose(fitted.offsets, truth[1], atol=0.15)
    held_out, held_out_accepted = simulate(rng, 20_000, *truth)
    before = np.cumprod(Scaling.identity(3).confidences(held_out), axis=1)
    after = np.cumprod(fitted.confidences(held_out), axis=1)
    for k in range(3):
        outcome = (held_out_accepted > k).astype(float)
        assert ece(after[:, k], outcome) < 0.012 < ece(before[:, k], outcome)


def test_the_order_within_a_position_is_kept():
    rng = np.random.default_rng(2)
    logits, accepted = simulate(rng, 500, [3.0], [1.0])
    fitted = fit_scaling(logits, accepted, np.ones(500))
    outcome = (accepted > 0).astype(float)
    before, after = Scaling.identity(1).confidences(logits)[:, 0], fitted.confidences(logits)[:, 0]
    assert np.argsort(before).tolist() == np.argsort(after).tolist()
    assert auroc(before, outcome) == auroc(after, outcome)


def test_survivals_keep_their_order_where_few_blocks_survive():
    """A head that says too much by an offset at seven positions, as real ones do: held-out errors are small
    and AUROC stays, at the last positions too."""
    rng = np.random.default_rng(4)
    offsets = [-0.5, -0.4, -0.3, -0.3, -0.2, -0.3, -0.3]

    def blocks(count: int) -> tuple[np.ndarray, np.ndarray]:
        honest = rng.normal(-0.4, 0.8, size=(count, 1)) + rng.normal(0.0, 0.6, size=(count, 7))
        kept = rng.random(honest.shape) < 1.0 / (1.0 + np.exp(-honest))
        return honest - offsets, np.cumprod(kept, axis=1).sum(axis=1)

    logits, accepted = blocks(12_000)
    fitted = fit_scaling(logits, accepted, np.full(12_000, 7))
    held_out, held_out_accepted = blocks(12_000)
    before = np.cumprod(Scaling.identity(7).confidences(held_out), axis=1)
    after = np.cumprod(fitted.confidences(held_out), axis=1)
    outcomes = [(held_out_accepted > k).astype(float) for k in range(7)]
    moves = [auroc(after[:, k], y) - auroc(before[:, k], y) for k, y in enumerate(outcomes)]
    assert np.abs(moves).max() < 0.005
    assert np.mean([ece(after[:, k], y) for k, y in enumerate(outcomes)]) < 0.01
    assert np.mean([ece(before[:, k], y) for k, y in enumerate(outcomes)]) > 0.025


def test_calibrated_logits_stay_about_as_they_are():
    logits, accepted = simulate(np.random.default_rng(3), 20_000, [1.0, 1.0])
    fitted = fit_scaling(logits, accepted, np.full(20_000, 2))
    assert fitted.temperatures.tolist() == [1.0, 1.0]
    np.testing.assert_allclose(fitted.offsets, 0.0, atol=0.08)


def test_few_survivors_get_an_offset_alone():
    logits, accepted = simulate(np.random.default_rng(5), 400, [4.0], [-4.0])
    assert 5 < accepted.sum() < 100
    few = fit_scaling(logits, accepted, np.ones(400))
    assert few.temperatures[0] == 1.0
    assert few.offsets[0] < -1.0
    assert fit_scaling(logits, accepted, np.ones(400), min_survivors=0).temperatures[0] > 1.0


def test_what_is_known_of_a_block():
    survived, known = survival_outcomes([2, 2, 0, 3], [2, 3, 0, 3], 3)
    assert survived.tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 0], [1, 1, 1]]
    assert known.tolist() == [[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 1, 1]]


def test_a_position_never_seen_keeps_one():
    fitted = fit_scaling(np.full((4, 2), 3.0), [1, 1, 1, 1], [1, 1, 1, 1])
    assert (fitted.temperatures[1], fitted.offsets[1]) == (1.0, 0.0)
    nothing = fit_scaling(np.zeros((0, 3)), [], [])
    assert nothing.temperatures.tolist() == [1.0, 1.0, 1.0]
    assert nothing.offsets.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("accepted", [0, 1])
def test_equal_outcomes_give_a_finite_offset(accepted: int):
    fitted = fit_scaling(np.zeros((50, 1)), np.full(50, accepted), np.ones(50))
    assert 1.0 < abs(fitted.offsets[0]) < 10.0


def test_the_grid_contains_one_and_extreme_logits_do_not_overflow():
    assert np.isclose(DEFAULT_GRID, 1.0).any()
    assert Scaling(np.full(2, 0.1), np.zeros(2)).confidences([[1e6, -1e6]]).tolist() == [[1.0, 0.0]]
    assert np.isfinite(fit_scaling([[1e6], [-1e6]], [1, 0], [1, 1], min_survivors=0).offsets).all()


def test_nan_logits_are_a_bug_of_the_caller():
    with pytest.raises(AssertionError):
        fit_scaling([[np.nan]], [0], [1])
