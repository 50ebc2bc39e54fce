"""The verification modes on known answers."""

import dataclasses

import numpy as np
import pytest

from dspark_ray.core.errors import ConfigError
from dspark_ray.core.types import VerificationMode
from dspark_ray.scheduling.lengths import LENGTH_RULES, LengthView, search_budget
from dspark_ray.scheduling.survival import rank_tokens, survival

A = survival(np.array([[0.9, 0.6, 0.2], [0.8, 0.5, 0.1]]))


def view(**changes) -> LengthView:
    """Two requests, γ = 3; SPS peaks at 5 rows, that is at B = 3 draft tokens."""
    fields = {
        "current_survival": A,
        "stale_survival": A,
        "max_lens": np.array([3, 3]),
        "base_rows": 2,
        "num_decoding": 2,
        "cost_ms": 1.0 / np.array([0.04, 0.06, 0.08, 0.1, 0.05, 0.03, 0.01]),
    }
    return LengthView(**{**fields, **changes})


def decide(mode: str, **changes):
    return LENGTH_RULES.get(mode)(view(**changes))


@pytest.mark.parametrize("mode", ["algorithm1", "adaptive"])
def test_worked_check_of_the_paper(mode):
    decision = decide(mode)
    assert decision.lens.tolist() == [2, 1]
    assert decision.budget == 3
    assert decision.expected_tokens == pytest.approx(2 + 0.9 + 0.54 + 0.8)


def test_every_mode_of_the_config_has_a_rule():
    assert LENGTH_RULES.names() == sorted(mode.value for mode in VerificationMode)
    with pytest.raises(ConfigError, match="adaptive"):
        LENGTH_RULES.get("best")


def test_off():
    decision = decide("off", cap_tokens=5)
    assert decision.lens.tolist() == [0, 0]
    assert decision.expected_tokens == 2.0


def test_fixed():
    assert decide("fixed").lens.tolist() == [3, 3]
    assert decide("fixed", fixed_tokens=2, max_lens=np.array([1, 3])).lens.tolist() == [1, 2]
    assert decide("fixed", max_lens=np.array([9, 0])).lens.tolist() == [3, 0]


def test_threshold():
    assert decide("threshold", threshold=0.4).lens.tolist() == [2, 2]
    assert decide("threshold", threshold=0.5, max_lens=np.array([1, 3])).lens.tolist() == [1, 1]
    assert decide("threshold", threshold=1.0).lens.tolist() == [0, 0]


def test_algorithm1_stops_at_the_first_drop_where_a_full_search_goes_on():
    # Θ by B: .2, .145, .17, .202 …: dearer by a stair at B = 1, then free.
    stairs = np.array([10.0, 20.0, 20.0, 20.0, 20.0, 20.0, 20.0])
    ones = np.ones((2, 3))
    assert decide("algorithm1", cost_ms=stairs, current_survival=ones).budget == 0
    assert decide("adaptive", cost_ms=stairs, stale_survival=ones).budget == 6


def test_algorithm1_takes_everything_that_is_free_and_worth_something():
    flat = np.full(7, 10.0)
    assert decide("algorithm1", cost_ms=flat).lens.tolist() == [3, 3]
    half = np.array([[0.5, 0.0, 0.0], [0.5, 0.5, 0.0]])
    assert decide("algorithm1", cost_ms=flat, current_survival=half).lens.tolist() == [1, 2]


def test_adaptive_budget_is_stale_and_filling_is_current():
    stale = survival(np.array([[0.1, 0.1, 0.1], [0.95, 0.9, 0.9]]))
    decision = decide("adaptive", stale_survival=stale)
    assert decision.budget == search_budget(rank_tokens(stale, np.array([3, 3]))[0], 2, view().cost_ms) == 3
    assert decision.lens.tolist() == [2, 1]  # by current survival


def test_adaptive_believes_claims_as_far_as_they_came_true():
    believed = decide("adaptive", cost_ms=10.0 + 3.0 * np.arange(7))
    doubted = decide("adaptive", cost_ms=10.0 + 3.0 * np.arange(7), claim_factor=0.5)
    assert believed.budget > doubted.budget
    assert doubted.lens.sum() == doubted.budget


@pytest.mark.parametrize("mode", ["fixed", "threshold", "algorithm1", "adaptive"])
@pytest.mark.parametrize("cap", [0, 1, 2])
def test_the_cap_binds_and_the_best_tokens_stay(mode, cap):
    decision = decide(mode, cap_tokens=cap, threshold=0.0)
    assert decision.budget == cap
    assert decision.lens.tolist() == [[0, 0], [1, 0], [1, 1]][cap]


@pytest.mark.parametrize("mode", ["fixed", "threshold", "algorithm1", "adaptive"])
def test_a_wide_cap_changes_nothing(mode):
    assert decide(mode, cap_tokens=100).lens.tolist() == decide(mode).lens.tolist()


def test_search_prefers_the_smaller_of_equals_and_stays_inside_the_curve():
    zeros = np.zeros((2, 3))
    assert search_budget(rank_tokens(zeros, np.array([3, 3]))[0], 2, np.full(7, 10.0)) == 0
    ones = np.ones((2, 3))
    assert search_budget(rank_tokens(ones, np.array([3, 3]))[0], 2, np.full(3, 10.0)) == 2
    assert search_budget(rank_tokens(ones, np.array([3, 3]))[0], 2, np.full(7, 10.0), cap_tokens=4) == 4
    assert search_budget(rank_tokens(ones, np.array([3, 3]))[0], 2, np.full(7, 10.0), cap_tokens=-1) == 0


def test_search_equals_trying_every_budget():
    rng = np.random.default_rng(1)
    for _ in range(100):
        num_requests, block = int(rng.integers(1, 5)), int(rng.integers(1, 5))
        stale = survival(rng.random((num_requests, block)))
        max_lens = rng.integers(0, block + 1, size=num_requests)
        cost = np.cumsum(rng.choice([0.0, 0.2, 3.0], size=int(max_lens.sum()) + 1)) + 5.0
        values = sorted((stale[r, k] for r in range(num_requests) for k in range(max_lens[r])), reverse=True)
        theta = [(num_requests + sum(values[:b])) / cost[b] for b in range(len(cost))]
        assert theta[search_budget(rank_tokens(stale, max_lens)[0], num_requests, cost)] == pytest.approx(
            max(theta)
        )


def test_views_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        view().threshold = 0.5
