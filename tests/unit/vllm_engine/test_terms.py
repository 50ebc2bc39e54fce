"""What a plan leaves of vLLM's choice; no vLLM needed."""

import numpy as np
import pytest

from dspark_ray.core.types import StepPlan
from dspark_ray.vllm_engine.terms import NO_LIMIT, Limit, RankBudget, StepTerms

STAIRS = np.array([10.0, 10.0, 10.0, 12.0, 12.0, 20.0])  # B = 0..5


def terms(now_ms: float, rate: float | None = None, group_step_ms: float | None = None) -> StepTerms:
    return StepTerms.of(
        StepPlan("r", 1, 1, "p", draft_tokens_per_s=rate, group_step_ms=group_step_ms), now_ms
    )


def test_without_a_plan_there_is_no_limit() -> None:
    assert RankBudget(4).limit(None, STAIRS) == NO_LIMIT
    assert RankBudget(4).limit(terms(0.0), STAIRS) == NO_LIMIT


def test_a_share_is_kept_over_many_steps() -> None:
    budget, verified = RankBudget(4), 0
    for step in range(1000):  # of 10 ms each, 10 s in all; vLLM takes all it may, up to 5
        cap = budget.limit(terms(step * 10.0, rate=150.0), STAIRS).cap_tokens
        assert cap is not None
        budget.spend(min(cap, 5))
        verified += min(cap, 5)
    assert verified == pytest.approx(1500, rel=0.03)


def test_when_the_plan_ends_the_share_does() -> None:
    budget = RankBudget(4)
    budget.limit(terms(0.0, rate=1.0), STAIRS)
    budget.spend(100)
    assert budget.limit(terms(1.0, rate=1.0), STAIRS).cap_tokens == 0
    assert budget.limit(None, STAIRS) == NO_LIMIT
    assert budget.limit(terms(2.0, rate=1.0), STAIRS).cap_tokens == 4  # a block, as at the beginning


@pytest.mark.parametrize(("group_ms", "free"), [(10.0, 2), (11.9, 2), (12.0, 4), (30.0, 5), (9.0, 0)])
def test_a_group_waits_anyway(group_ms: float, free: int) -> None:
    assert RankBudget(4).limit(terms(0.0, group_step_ms=group_ms), STAIRS) == Limit(free, group_ms)


def test_the_tighter_one_counts() -> None:
    budget = RankBudget(4)
    assert budget.limit(terms(0.0, rate=4.0, group_step_ms=10.0), STAIRS).cap_tokens == 2
    assert budget.limit(terms(0.0, rate=4.0, group_step_ms=30.0), STAIRS).cap_tokens == 4


def test_ranks_with_equal_inputs_agree() -> None:
    """No clock, no socket: what a rank chooses follows from what all of them are told."""
    rng = np.random.default_rng(0)
    ranks = [RankBudget(7), RankBudget(7)]
    for step in range(200):
        rate = None if step % 50 == 49 else float(rng.integers(10, 2000))
        told = terms(step * 8.0, rate, group_step_ms=12.0 if step % 3 else None)
        first, second = (rank.limit(told, STAIRS) for rank in ranks)
        assert first == second
        for rank in ranks:
            rank.spend(min(5, 5 if first.cap_tokens is None else first.cap_tokens))
