"""Whether to draft, for how many requests and how many tokens each: paid for before any length is chosen.

A block drafter's time grows with its block once several requests are drafted together (every slot is a row of
the backbone and of the LM head), and slots that are never verified buy nothing. So all widths from none to γ
are compared by the throughput that recent drafts promise at the present load. Everything here is decided for
the *next* step from past steps, so that a block that exists is never thrown away for what is in it
(`lengths.py`, "Losslessness").
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_ray.scheduling.correction import ClaimCorrection
from dspark_ray.scheduling.recent_survival import RecentSurvival
from dspark_ray.scheduling.survival import Floats, clean_survival
from dspark_ray.scheduling.utility import Claims, utility_curve

_REVIEW_STEPS = 16  # between two looks at an unchanged load
_IDLE_REVIEW_STEPS = 32  # the same while nothing is drafted: only costs can have changed
_COMES_BACK_AT = 1.02  # gain at which speculation that is off comes back
# Between probes: twice as many after each one that changed nothing.
_FIRST_PROBE_STEPS, _LAST_PROBE_STEPS = 4, 512
_PROBE_SHARE = 8  # one request in so many is drafted in a probe
_PLAIN_EVERY = 64  # one step in so many is plain while speculation is on, to know what it would cost

Float64Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Costs:
    """What the next step would cost at the present load."""

    verify_ms: Float64Array  # [B + 1] the target step with B draft tokens, without drafting
    draft_ms: Sequence[float]  # [γ + 1] drafting so many tokens for every request; 0 for none
    group_step_ms: float = 0.0  # a step that waits for its group lasts this long at least
    claims: Claims | None = None  # then it is utility that must win


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Drafts for the next step."""

    num_requests: int
    num_tokens: int  # of each; 0: none is drafted


class Drafting:
    """Speculation's own switch, `adaptive`: on while it pays; off, it is probed, ever more rarely.

    A probe drafts few requests, to see whether texts have become easier. A change of load needs none: widths
    are compared anew at every review. On, a plain step now and then says what the other side costs.
    """

    def __init__(self, recent: RecentSurvival, claims: ClaimCorrection) -> None:
        self._recent, self._claims = recent, claims
        self._width = 0
        self._reviewed_count = self._review_in = 0
        self._probe_every = _FIRST_PROBE_STEPS
        self._probe_in = 0
        self._steps_on = 0

    def plan(self, num_requests: int, costs: Callable[[], Costs]) -> DraftPlan:
        """For the next step with so many decoding requests that may be drafted. Called once a step."""
        if num_requests == 0:
            return DraftPlan(0, 0)
        self._review_in -= 1
        if num_requests != self._reviewed_count or self._review_in <= 0:
            survival = self._recent.rows * self._claims.factor
            self._width = best_width(survival, num_requests, costs(), now_on=self._width > 0)
            self._reviewed_count = num_requests
            self._review_in = _REVIEW_STEPS if self._width > 0 else _IDLE_REVIEW_STEPS
        if self._width > 0:
            self._probe_every = self._probe_in = _FIRST_PROBE_STEPS
            self._steps_on += 1
            if self._steps_on % _PLAIN_EVERY == 0:
                return DraftPlan(0, 0)
            return DraftPlan(num_requests, self._width)
        self._probe_in -= 1
        if self._probe_in > 0:
            return DraftPlan(0, 0)
        self._probe_every = min(2 * self._probe_every, _LAST_PROBE_STEPS)
        self._probe_in = self._probe_every
        self._review_in = min(self._review_in, _REVIEW_STEPS)
        return DraftPlan(-(-num_requests // _PROBE_SHARE), self._recent.rows.shape[1])


def best_width(survival: Floats, num_requests: int, costs: Costs, *, now_on: bool) -> int:
    """Tokens to draft for each request so that throughput is highest, 0..γ; 0: plain decoding is faster.

    survival [K, γ]: recent drafts, which stand for those to come. Of all their tokens the likeliest are
    verified, `num_requests` / K of them a step. What is off comes back for a gain of 2% only.
    """
    rows = clean_survival(survival)
    kept, gamma = rows.shape
    plain_ms = max(float(costs.verify_ms[0]), costs.group_step_ms)
    if costs.claims is not None:
        gains = _utility_gains(rows, costs, plain_ms)
    else:
        order = np.argsort(-rows.ravel(), kind="stable")
        values, positions = rows.ravel()[order], order % gamma
        share = num_requests / kept
        inside = positions < np.arange(1, gamma + 1)[:, None]  # [γ, K · γ] the tokens that a width drafts
        worth = np.cumsum(np.where(inside, values, 0.0), axis=1) * share
        tokens = np.cumsum(inside, axis=1) * share
        step_ms = np.interp(tokens.ravel(), np.arange(len(costs.verify_ms)), costs.verify_ms)
        step_ms = step_ms.reshape(tokens.shape) + np.asarray(costs.draft_ms[1 : gamma + 1])[:, None]
        per_request = 1.0 + worth / num_requests
        gain = per_request * plain_ms / np.maximum(step_ms, costs.group_step_ms)
        gains = np.where(tokens <= len(costs.verify_ms) - 1, gain, 0.0).max(axis=1)
    best = int(np.argmax(gains))
    return best + 1 if gains[best] > (1.0 if now_on else _COMES_BACK_AT) else 0


def _utility_gains(rows: Floats, costs: Costs, plain_ms: float) -> Float64Array:
    """Best utility over plain decoding's by width, where requests are not equal: whole blocks or none."""
    assert costs.claims is not None
    count, gamma = len(costs.claims.weights), rows.shape[1]
    block = np.tile(rows.mean(axis=0), (count, 1))
    max_lens = np.full(count, gamma, dtype=np.int64)
    drafting_ms = np.maximum(costs.verify_ms + costs.draft_ms[gamma], costs.group_step_ms)
    speculating = utility_curve(block, max_lens, costs.claims, drafting_ms)[1].max()
    plain = utility_curve(block, max_lens, costs.claims, np.array([plain_ms]))[1][0]
    return np.array([*np.zeros(gamma - 1), speculating / plain])
