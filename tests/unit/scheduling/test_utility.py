"""Tiers and speed targets: brute force, the target that only weights meet, and no starvation."""

import itertools

import numpy as np
import pytest

from dspark_ray.core.types import TierTerms
from dspark_ray.scheduling.lengths import LENGTH_RULES, LengthView, search_budget
from dspark_ray.scheduling.survival import rank_tokens, survival
from dspark_ray.scheduling.utility import Claims, best_utility, claims_of, utility_curve

TERMS = (TierTerms("flex", 0.5), TierTerms("default", 1.0), TierTerms("priority", 2.0, 60.0))


def utility(scores: np.ndarray, lens: tuple[int, ...], claims: Claims, step_ms: float) -> float:
    total = 0.0
    for row, length in enumerate(lens):
        emitted = 1.0 + scores[row, :length].sum()
        owed = claims.targets_per_ms[row] * step_ms
        total += claims.weights[row] * (emitted + claims.boost * min(emitted, owed))
    return total / step_ms


def random_case(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, Claims, np.ndarray]:
    num, block = int(rng.integers(1, 4)), 3
    scores = survival(rng.random((num, block)) ** 0.4)
    max_lens = rng.integers(0, block + 1, size=num)
    targets = np.where(rng.random(num) < 0.6, rng.random(num) * 0.4, 0.0)
    claims = Claims(rng.choice([0.5, 1.0, 2.0], size=num), targets, float(rng.choice([0.0, 8.0])))
    cost_ms = 5.0 + np.cumsum(rng.choice([0.0, 0.3, 4.0], size=int(max_lens.sum()) + 1))
    return scores, max_lens, claims, cost_ms


def test_the_budget_is_worth_what_brute_force_finds():
    rng = np.random.default_rng(11)
    for _ in range(60):
        scores, max_lens, claims, cost_ms = random_case(rng)
        best = max(
            utility(scores, lens, claims, float(cost_ms[sum(lens)]))
            for lens in itertools.product(*(range(most + 1) for most in max_lens))
        )
        budgets, curve = utility_curve(scores, max_lens, claims, cost_ms)
        assert float(curve.max()) == pytest.approx(best)
        assert best_utility(scores, max_lens, claims, cost_ms).budget == budgets[np.argmax(curve)]


def test_equal_weights_without_targets_are_throughput():
    rng = np.random.default_rng(12)
    for _ in range(30):
        scores, max_lens, _, cost_ms = random_case(rng)
        even = Claims(np.full(len(scores), 3.0), np.zeros(len(scores)), 8.0)
        budget = best_utility(scores, max_lens, even, cost_ms).budget
        assert budget == search_budget(rank_tokens(scores, max_lens)[0], len(scores), cost_ms)


def test_a_target_is_met_by_weights_where_throughput_alone_misses_it():
    """One priority request with a mediocre drafter among seven ordinary ones with a good one, rows dear."""
    scores = np.array([[0.75, 0.55, 0.4]] + [[0.9, 0.8, 0.7]] * 7)
    cost_ms = 20.0 + 2.0 * np.arange(scores.size + 1)
    tiers = np.array([2] + [1] * 7)
    claims = claims_of(tiers, np.zeros(8, dtype=np.float32), TERMS, 8.0)
    speeds = {}
    for name, given in (("local", None), ("weighted", claims)):
        view = LengthView(scores, scores, np.full(8, 3), 8, 8, cost_ms, claims=given)
        lens = LENGTH_RULES.get("adaptive")(view).lens
        speeds[name] = 1e3 * (1 + scores[0, : lens[0]].sum()) / cost_ms[lens.sum()]
    assert speeds["local"] < 60.0 <= speeds["weighted"]


def test_a_request_names_its_own_target():
    claims = claims_of(np.array([2, 2, 0]), np.array([10, 0, 5], dtype=np.float32), TERMS, 8.0)
    assert claims is not None
    assert claims.targets_per_ms.tolist() == pytest.approx([0.010, 0.060, 0.005])
    assert claims.weights.tolist() == [2.0, 2.0, 0.5]
    assert claims_of(np.array([2]), np.zeros(1, dtype=np.float32), (), 8.0) is None


def test_weights_bound_what_may_be_passed_over():
    """A likely token of the lowest tier goes before unlikely ones of the highest, below its target or not."""
    scores = np.array([[0.9]] + [[0.9 * 0.5 / (2.0 * 9.0) * 0.99]] * 5)
    claims = claims_of(np.array([0] + [2] * 5), np.full(6, 1e4, dtype=np.float32), TERMS, 8.0)
    view = LengthView(scores, scores, np.ones(6, dtype=np.int64), 6, 6, np.full(7, 10.0), 1, claims=claims)
    assert LENGTH_RULES.get("adaptive")(view).lens.tolist() == [1, 0, 0, 0, 0, 0]


def test_many_tokens_are_searched_coarsely_but_well():
    rng = np.random.default_rng(13)
    scores = survival(rng.random((40, 7)) ** 0.3)
    max_lens = np.full(40, 7)
    cost_ms = 10.0 + 0.1 * np.arange(281)
    claims = Claims(np.ones(40), np.full(40, 0.1), 8.0)
    budgets, curve = utility_curve(scores, max_lens, claims, cost_ms)
    assert len(budgets) == 65
    assert (budgets[0], budgets[-1]) == (0, 280)
    few, _ = utility_curve(scores, max_lens, claims, cost_ms, cap_tokens=10)
    assert few.tolist() == list(range(11))
    assert curve.max() > curve[0]
