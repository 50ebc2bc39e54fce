"""Survival is a cumulative product, and a budget is filled with prefixes of the best."""

import numpy as np

from dspark_ray.scheduling.survival import admit_top, admitted_survival, rank_tokens, survival


def brute_force_top(scores: np.ndarray, budget: int, max_lens: np.ndarray) -> list[int]:
    """The same by sorting Python tuples."""
    tokens = [
        (-scores[r, k], k, r) for r in range(len(scores)) for k in range(min(max_lens[r], scores.shape[1]))
    ]
    lens = [0] * len(scores)
    for _, _, row in sorted(tokens)[:budget]:
        lens[row] += 1
    return lens


def test_survival_is_the_cumulative_product():
    a = survival(np.array([[0.9, 0.6, 0.2], [0.8, 0.5, 0.1]], dtype=np.float32))
    np.testing.assert_allclose(a, [[0.9, 0.54, 0.108], [0.8, 0.4, 0.04]], rtol=1e-6)


def test_survival_of_nonsense_is_safe():
    a = survival(np.array([[0.5, np.nan, 0.9], [2.0, -1.0, 0.5], [np.inf, 0.5, -np.inf]]))
    np.testing.assert_array_equal(a, [[0.5, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.5, 0.0]])


def test_admission_equals_a_sort_in_python():
    rng = np.random.default_rng(0)
    for _ in range(200):
        num_requests, block = rng.integers(0, 6), rng.integers(1, 6)
        # Few distinct values, so that ties are common.
        scores = survival(rng.choice([0.0, 0.5, 0.9, 1.0], size=(num_requests, block)))
        max_lens = rng.integers(0, block + 2, size=num_requests)
        budget = int(rng.integers(0, num_requests * block + 3))
        lens = admit_top(scores, budget, max_lens)
        assert lens.dtype == np.int64
        assert lens.tolist() == brute_force_top(scores, budget, max_lens)


def test_ties_favour_the_earlier_position_then_the_lower_row():
    ones = np.ones((3, 2))
    full = np.full(3, 2)
    assert admit_top(ones, 1, full).tolist() == [1, 0, 0]
    assert admit_top(ones, 4, full).tolist() == [2, 1, 1]


def test_budget_is_met_even_by_worthless_tokens_and_never_exceeded():
    zeros = np.zeros((2, 3))
    assert admit_top(zeros, 4, np.array([3, 3])).tolist() == [2, 2]
    assert admit_top(zeros, 99, np.array([1, 2])).tolist() == [1, 2]
    assert admit_top(zeros, -1, np.array([3, 3])).tolist() == [0, 0]
    assert admit_top(np.full((2, 2), np.nan), 1, np.array([2, 2])).tolist() == [1, 0]


def test_scores_that_rise_along_a_block_still_give_prefixes():
    """A later score above an earlier one counts as much as the earlier one, no more."""
    values, rows = rank_tokens(np.array([[0.2, 0.9], [0.5, 0.1]]), np.array([2, 2]))
    assert values.tolist() == [0.5, 0.2, 0.2, 0.1]
    assert rows.tolist() == [1, 0, 0, 1]


def test_no_requests():
    assert admit_top(np.zeros((0, 7)), 5, np.zeros(0, dtype=np.int64)).tolist() == []


def test_admitted_survival_sums_the_prefixes():
    a = np.array([[0.9, 0.54, 0.108], [0.8, 0.4, 0.04]])
    np.testing.assert_allclose(admitted_survival(a, np.array([2, 1])), 0.9 + 0.54 + 0.8)
