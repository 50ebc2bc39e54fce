"""What emitted tokens count when requests are not equal: tiers, and speeds that requests are owed.

A request of weight w that emits e tokens in a step of T ms, and is owed g tokens per ms, has the utility
w·(e + β·min(e, g·T)) / T per ms: its tokens count w, and (1 + β)·w while it is below its target. That is
concave in e, so for a given step time the tokens of highest marginal utility are the best ones; the budget
is then searched over the cost curve as throughput is (`lengths.search_budget`).

Nothing starves: every decoding request emits at least one token a step whatever the weights, and a
token of survival a is never passed over for one of survival below a·w / (w'·(1 + β)).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_ray.core.types import FloatArray, IntArray, TierTerms
from dspark_ray.scheduling.survival import Floats, clean_survival, rank_tokens

Float64Array = NDArray[np.float64]

_SEARCHED = 64  # budgets looked at where step times matter for what tokens count; all of them if fewer


@dataclass(frozen=True, slots=True)
class Claims:
    """What R decoding requests claim."""

    weights: Float64Array  # [R] > 0
    targets_per_ms: Float64Array  # [R] tokens per millisecond owed; 0: none
    boost: float  # β: how much more a token counts below the target

    @property
    def has_targets(self) -> bool:
        return self.boost > 0 and bool((self.targets_per_ms > 0).any())


@dataclass(frozen=True, slots=True)
class BestBudget:
    """The budget of highest utility, and what tokens count in a step of its length."""

    budget: int
    worth: Float64Array  # [R, γ] non-increasing along γ


def claims_of(
    tiers: IntArray, targets_per_s: FloatArray, terms: Sequence[TierTerms], boost: float
) -> Claims | None:
    """Requests' claims under the plan's terms; None without terms. tiers [R] in SERVICE_TIERS; targets_per_s
    [R], 0: its tier's. `terms` has one entry per tier, in their order.
    """
    if not terms:
        return None
    weights = np.array([one.weight for one in terms], dtype=np.float64)[tiers]
    owed = np.array([one.target_tokens_per_s or 0.0 for one in terms], dtype=np.float64)[tiers]
    targets = np.where(targets_per_s > 0, targets_per_s, owed)
    return Claims(weights, targets / 1e3, boost)


def utility_curve(
    survival: Floats,
    max_lens: IntArray,
    claims: Claims,
    cost_ms: Float64Array,
    cap_tokens: int | None = None,
) -> tuple[IntArray, Float64Array]:
    """Utility per ms of the budgets searched. survival [R, γ], cost_ms [Bmax + 1] → (budgets [K], [K])

    Exact for every budget without targets, and for up to 64 tokens with them; beyond that for 65 budgets
    from none to all.
    """
    most = min(int(np.minimum(max_lens, survival.shape[1]).sum()), len(cost_ms) - 1)
    most = most if cap_tokens is None else max(0, min(most, cap_tokens))
    if not claims.has_targets:
        worth = np.repeat(claims.weights[:, None], survival.shape[1], axis=1)
        ranked, _ = rank_tokens(survival, max_lens, worth)
        gained = np.concatenate(([0.0], np.cumsum(ranked[:most])))
        return np.arange(most + 1), (claims.weights.sum() + gained) / cost_ms[: most + 1]
    budgets = np.unique(np.linspace(0, most, min(most, _SEARCHED) + 1).round().astype(np.int64))
    emitted = 1.0 + np.cumsum(clean_survival(survival), axis=1)  # [R, γ]
    levels = np.concatenate((np.ones((len(emitted), 1)), emitted), axis=1)  # [R, γ + 1]
    allowed = np.arange(survival.shape[1])[None, :] < max_lens[:, None]
    utility = np.zeros(len(budgets))
    for place, budget in enumerate(budgets):
        step_ms = float(cost_ms[budget])
        met = np.minimum(levels, (claims.targets_per_ms * step_ms)[:, None])
        worth = claims.weights[:, None] * (levels + claims.boost * met)
        marginal = np.where(allowed, np.diff(worth, axis=1), 0.0).ravel()
        utility[place] = (worth[:, 0].sum() - np.sort(-marginal)[:budget].sum()) / step_ms
    return budgets, utility


def best_utility(
    survival: Floats,
    max_lens: IntArray,
    claims: Claims,
    cost_ms: Float64Array,
    cap_tokens: int | None = None,
) -> BestBudget:
    """The budget of highest utility, the smallest of equals. Lossless only with scores that have not seen the
    current blocks: `lengths.py`. Arguments as for `utility_curve`.
    """
    budgets, utility = utility_curve(survival, max_lens, claims, cost_ms, cap_tokens)
    budget = int(budgets[np.argmax(utility)])
    before = 1.0 + np.cumsum(clean_survival(survival), axis=1) - clean_survival(survival)
    below = before < (claims.targets_per_ms * float(cost_ms[budget]))[:, None]
    return BestBudget(budget, claims.weights[:, None] * np.where(below, 1.0 + claims.boost, 1.0))
