"""How many draft tokens of each request are verified in a step: the five verification modes.

Losslessness
------------
The output keeps the target's distribution only if **the decision to verify draft token k of a request does
not depend on the value x_k of that token**. A token that is verified is accepted with probability
min(1, p/q) and replaced from the residual otherwise; a token that is not verified is thrown away and its
place drawn from p. Both give p, as long as the choice between the two is made without looking at x_k. A
rule that keeps the good draws and drops the bad ones draws from neither.

Where can x_k hide? The confidence head's contract is that c_k is a function of the tokens before k: the
hidden state at k and the embedding of x_{k−1}. So the scores up to k may be used, and the scores
after k may not: c_{k+1} has seen x_k. Other requests' scores are free, since their tokens are drawn
independently. `max_lens` and `cost_ms` must be known before the block is drawn.

- `fixed`, `threshold`: a token's own score, which has not seen the token. Lossless.
- `algorithm1`: tokens of all requests in the order of current survival, admitted while the throughput Θ
  rises. When position k is considered, only scores up to k have been looked at. It must stop at the
  first drop: looking past it for a second peak means that c_{k+1} decides about k.
- `adaptive`: the step cost is a staircase, so Θ has several peaks and stopping at the first one loses
  throughput. The budget B* comes from a full search, but over *stale* scores, at least two steps old, which
  know nothing of the current block. Then the B* highest current survivals are admitted: the rank of
  position k is decided by scores up to k of its own request, since its later ones are never above it.
- A full search over the *current* scores is not lossless. Appendix A: γ = 2, a_1 = .8, p = (.7, .3),
  q = (.5, .5), SPS = 1, .5, .45 at 1, 2, 3 rows. If x_1 = A then c_2 = .9 and the search verifies two
  tokens; if x_1 = B then c_2 = 0 and it verifies none, so every B is thrown away and drawn anew from p.
  The output becomes (.85, .15).

Requests whose text is a function of the model and the request alone are free of all this: a greedy text is
the chain of the target's argmaxes and a shared-noise text that of its noisy ones, whatever is drafted and
verified. Their current scores may stand in for stale ones, and do (`stale_survival`).

The cap on draft tokens binds in every mode: under it the best tokens of what the mode wanted are admitted.

Requests that claim more than others (`utility.py`) change what a token counts in `adaptive`: the budget
maximises utility instead of throughput, and tokens are ranked by survival × worth. The worth comes from
tiers, targets and stale scores, so it has not seen the block either.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_ray.core.registry import Registry
from dspark_ray.core.types import IntArray, VerificationMode
from dspark_ray.scheduling.step_table import StepTable
from dspark_ray.scheduling.survival import Floats, admit_top, admitted_survival, clean_survival, rank_tokens
from dspark_ray.scheduling.utility import Claims, best_utility


def length_rule(mode: VerificationMode, table: StepTable | None) -> str:
    """The name of a mode's rule. Without a table, or with a flat one, nothing is known to cost anything: the
    modes that search verify everything."""
    searches = mode in (VerificationMode.ADAPTIVE, VerificationMode.ALGORITHM1)
    if searches and (table is None or table.is_flat()):
        return VerificationMode.FIXED.value
    return mode.value


@dataclass(frozen=True, slots=True)
class LengthView:
    """All that a rule may look at in one step."""

    current_survival: Floats  # [R, γ] of the blocks at hand
    # [R, γ] at least two steps old, priors filled in; of greedy and shared-noise requests the current ones
    stale_survival: Floats
    max_lens: IntArray  # [R] most tokens to verify; 0: this request has no draft
    base_rows: int  # rows of the step without any draft token: anchors and prefill (already in cost_ms)
    num_decoding: int  # requests that emit at least one token in this step
    cost_ms: NDArray[np.float64]  # [Σ max_lens + 1] predicted step time with B draft tokens, draft included
    cap_tokens: int | None = None  # most draft tokens that the shared cap allows now
    fixed_tokens: int | None = None  # mode fixed; None: all
    threshold: float = 0.0  # mode threshold
    claims: Claims | None = None  # mode adaptive; None: all requests count the same
    claim_factor: float = 1.0  # mode adaptive: what stale survivals are worth, from past outcomes


@dataclass(frozen=True, slots=True)
class LengthDecision:
    """What is verified, and what it should bring."""

    lens: IntArray  # [R] draft tokens verified per request
    budget: int  # draft tokens allowed to the step; Σ lens
    expected_tokens: float  # tokens that the step should emit, by current survival


LengthRule = Callable[[LengthView], LengthDecision]

LENGTH_RULES: Registry[LengthRule] = Registry("verification mode")


@LENGTH_RULES.register(VerificationMode.OFF.value)
def verify_none(view: LengthView) -> LengthDecision:
    """Plain decoding."""
    return _decide(view, np.zeros(len(view.max_lens), dtype=np.int64))


@LENGTH_RULES.register(VerificationMode.FIXED.value)
def verify_fixed(view: LengthView) -> LengthDecision:
    """The same number for every request, whatever the scores and the load."""
    wanted = view.max_lens if view.fixed_tokens is None else np.minimum(view.max_lens, view.fixed_tokens)
    return _decide_under_cap(view, wanted)


@LENGTH_RULES.register(VerificationMode.THRESHOLD.value)
def verify_threshold(view: LengthView) -> LengthDecision:
    """Tokens whose survival is at least `threshold`."""
    passing = (clean_survival(view.current_survival) >= view.threshold).sum(axis=1)
    return _decide_under_cap(view, np.minimum(passing, view.max_lens))


@LENGTH_RULES.register(VerificationMode.ALGORITHM1.value)
def verify_algorithm1(view: LengthView) -> LengthDecision:
    """The paper's Algorithm 1: by current survival, while each token raises Θ; stop means stop."""
    values, rows = rank_tokens(view.current_survival, view.max_lens)
    limit = _limit(len(values), view.cost_ms, view.cap_tokens)
    theta = throughput(values[:limit], view.num_decoding, view.cost_ms)
    rises = np.diff(theta) > 0
    budget = limit if rises.all() else int(np.argmin(rises))
    return _decide(view, np.bincount(rows[:budget], minlength=len(view.max_lens)).astype(np.int64))


@LENGTH_RULES.register(VerificationMode.ADAPTIVE.value)
def verify_adaptive(view: LengthView) -> LengthDecision:
    """The budget of highest throughput by stale scores, filled with the highest current survivals."""
    if view.claims is not None:
        stale = view.stale_survival * view.claim_factor
        best = best_utility(stale, view.max_lens, view.claims, view.cost_ms, view.cap_tokens)
        return _decide(view, admit_top(view.current_survival, best.budget, view.max_lens, best.worth))
    values, rows = rank_tokens(view.stale_survival, view.max_lens)
    budget = search_budget(values * view.claim_factor, view.num_decoding, view.cost_ms, view.cap_tokens)
    if view.stale_survival is not view.current_survival:
        values, rows = rank_tokens(view.current_survival, view.max_lens)
    lens = np.bincount(rows[:budget], minlength=len(view.max_lens)).astype(np.int64)
    return LengthDecision(lens, budget, view.num_decoding + float(values[:budget].sum()))


def search_budget(
    ranked: NDArray[np.float64],
    num_decoding: int,
    cost_ms: NDArray[np.float64],
    cap_tokens: int | None = None,
) -> int:
    """B* = argmax_B Θ(B) over the whole cost curve, the smallest of equals.

    ranked [N]: survivals, best first; cost_ms [Bmax + 1] → draft tokens. Lossless only with scores that have
    not seen the current blocks (see the module's docstring).
    """
    limit = _limit(len(ranked), cost_ms, cap_tokens)
    return int(np.argmax(throughput(ranked[:limit], num_decoding, cost_ms)))


def throughput(
    ranked: NDArray[np.float64], num_decoding: int, cost_ms: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Θ(B) = (num_decoding + Σ_{i≤B} a_i) / cost(B) in tokens per ms. ranked [N], best first → [N + 1]"""
    gained = np.concatenate(([0.0], np.cumsum(ranked)))
    return np.asarray((num_decoding + gained) / cost_ms[: len(gained)], dtype=np.float64)


def _limit(num_tokens: int, cost_ms: NDArray[np.float64], cap_tokens: int | None) -> int:
    """Draft tokens that can be had at all, and whose cost is known."""
    limit = min(num_tokens, len(cost_ms) - 1)
    return limit if cap_tokens is None else max(0, min(limit, cap_tokens))


def _decide_under_cap(view: LengthView, wanted: IntArray) -> LengthDecision:
    lens = np.minimum(wanted, view.current_survival.shape[1]).astype(np.int64)
    if view.cap_tokens is not None and view.cap_tokens < lens.sum():
        lens = admit_top(view.current_survival, view.cap_tokens, lens)
    return _decide(view, lens)


def _decide(view: LengthView, lens: IntArray) -> LengthDecision:
    expected = view.num_decoding + admitted_survival(view.current_survival, lens)
    return LengthDecision(lens=lens, budget=int(lens.sum()), expected_tokens=expected)
