"""One replica's speculation, step by step: how much is verified, who is drafted next, and what steps cost.

The engine runs it on its sequences and the simulator on its slots, so that both decide alike. Requests are
rows of arrays here. Lossless by construction (`lengths.py`): budgets come from scores at least two steps old,
from the step table and from plans; the current block's scores only rank. Whether a request is drafted at all
is decided from past steps.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dspark_ray.core.types import FloatArray, IntArray, RowClaims, StepPlan, TierTerms, VerificationMode
from dspark_ray.scheduling.cap import TokenBucket, bucket_of_share, draft_token_cap
from dspark_ray.scheduling.correction import ClaimCorrection
from dspark_ray.scheduling.drafting import Costs, Drafting
from dspark_ray.scheduling.gate import GateSettings, should_draft
from dspark_ray.scheduling.lengths import LENGTH_RULES, LengthDecision, LengthView, length_rule
from dspark_ray.scheduling.live_costs import LiveCosts, StepSize
from dspark_ray.scheduling.load import Rates, request_counts, throughput_curve
from dspark_ray.scheduling.lockstep import within_step
from dspark_ray.scheduling.recent_survival import RecentSurvival
from dspark_ray.scheduling.step_table import StepTable
from dspark_ray.scheduling.utility import Claims, claims_of

STALE_STEPS = 2
"""How many drafts old the scores behind a budget are (design: "budget from scores ≥ 2 steps old")."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a step holds besides draft tokens."""

    prefill_rows: int
    context_tokens: int  # cached keys that the decoding rows attend to


@dataclass(frozen=True, slots=True)
class Blocks:
    """The drafts of R decoding requests."""

    current: FloatArray  # [R, γ] survival; 0 where there is no token
    searched: FloatArray  # [R, γ] what the budget is searched over (`searched_survival`)
    max_lens: IntArray  # [R] most tokens to verify; 0: this request has no draft


@dataclass(frozen=True, slots=True)
class Waits:
    """How R requests have fared lately, for the gate. Updated in place; all [R]."""

    zero_budget_steps: IntArray  # steps in a row in which something was drafted and nothing verified
    steps_since_draft: IntArray


class Speculation:
    """Verification lengths under one configured mode; owns the scores' history across requests."""

    def __init__(
        self,
        mode: VerificationMode,
        num_draft_tokens: int,
        table: StepTable | None,
        max_step_rows: int,
        *,
        fixed_tokens: int | None = None,
        threshold: float = 0.0,
    ) -> None:
        """fixed_tokens: mode fixed, None for all; threshold: mode threshold."""
        self.mode = mode
        self.num_draft_tokens = num_draft_tokens
        self.costs: LiveCosts | None = None
        self._max_step_rows = max_step_rows
        self.table = table
        # What couples this replica to others, while a plan holds.
        self.bucket: TokenBucket | None = None  # its share of the shared cap
        self.group_step_ms: float | None = None  # when its group's steps end
        self.tiers: tuple[TierTerms, ...] = ()
        self.target_boost = 0.0
        self.verified_in_full = False  # whether the last step's lengths were all that could be verified
        self._fixed_tokens = fixed_tokens if mode is VerificationMode.FIXED else None
        self._threshold = threshold
        self._gate = GateSettings()
        self._recent = RecentSurvival(num_draft_tokens, STALE_STEPS)
        self._worth = ClaimCorrection()
        self._drafting = Drafting(self._recent, self._worth)
        self.drafting_took_ms = 0.0  # after the step at hand
        self._num_drafted_tokens = (
            num_draft_tokens if self._fixed_tokens is None else max(1, self._fixed_tokens)
        )

    @property
    def table(self) -> StepTable | None:
        """What steps cost; None: nothing is known, and everything is verified."""
        return None if self.costs is None else self.costs.table

    @table.setter
    def table(self, table: StepTable | None) -> None:
        self.costs = None if table is None else LiveCosts(table, self._max_step_rows, self.num_draft_tokens)

    @property
    def mean_survival(self) -> FloatArray:
        """What to expect of a request without scores old enough. [γ]"""
        return self._recent.mean

    def couple(self, plan: StepPlan) -> None:
        """What a plan of the central scheduler changes."""
        self.group_step_ms = plan.group_step_ms
        self.tiers, self.target_boost = plan.tiers, plan.target_boost
        self.bucket = bucket_of_share(self.bucket, plan.draft_tokens_per_s, self.num_draft_tokens)

    def uncouple(self) -> None:
        """No plan holds."""
        self.bucket = self.group_step_ms = None
        self.tiers = ()

    # -- lengths -----------------------------------------------------------------------------------

    def lengths(
        self,
        blocks: Blocks,
        waits: Waits,
        load: Load,
        now_ms: float,
        claims: Claims | None,
        *,
        explore: bool = False,
    ) -> LengthDecision:
        """Lengths [R] for this step's decoding requests.

        `explore`, decided from past steps, verifies whole drafts under any mode: outcomes to learn from that
        no score selected.
        """
        count, max_lens = len(blocks.max_lens), blocks.max_lens
        self.verified_in_full = False
        if not max_lens.any():
            return LengthDecision(np.zeros(count, dtype=np.int64), 0, float(count))
        drafted_ms = self._draft_ms(int((max_lens > 0).sum()), self._num_drafted_tokens)
        cost_ms = self._cost_ms(count, load, int(max_lens.sum()), drafted_ms)
        cap_tokens = draft_token_cap(count, load.prefill_rows, self._max_step_rows, self.bucket, now_ms)
        if self.group_step_ms is not None and self.costs is not None:
            cost_ms, free_tokens = within_step(cost_ms, self.group_step_ms)
            cap_tokens = min(cap_tokens, free_tokens)
        view = LengthView(
            current_survival=blocks.current,
            stale_survival=blocks.searched,
            claim_factor=self._worth.factor,
            max_lens=max_lens,
            base_rows=count + load.prefill_rows,
            num_decoding=count,
            cost_ms=cost_ms,
            cap_tokens=cap_tokens,
            fixed_tokens=self._fixed_tokens,
            threshold=self._threshold,
            claims=claims,
        )
        rule = VerificationMode.FIXED.value if explore else length_rule(self.mode, self.table)
        decision = LENGTH_RULES.get(rule)(view)
        self.verified_in_full = rule == VerificationMode.FIXED.value and decision.budget == max_lens.sum()
        if self.bucket is not None:
            self.bucket.take(decision.budget)
        if not explore:
            zero = waits.zero_budget_steps
            zero[:] = np.where(max_lens > 0, np.where(decision.lens > 0, 0, zero + 1), zero)
        return decision

    def note_outcomes(self, claimed: float, accepted: int) -> None:
        """The step's verified tokens: Σ survival, and how many were accepted. Called once a step."""
        self._worth.note(claimed, accepted)

    # -- drafting ----------------------------------------------------------------------------------

    @property
    def drafts(self) -> bool:
        """Whether this mode drafts at all."""
        return self.mode is not VerificationMode.OFF and self._fixed_tokens != 0

    def to_draft(self, waits: Waits, load: Load, claims: Claims | None) -> IntArray:
        """Which of R requests, all of which could be, are drafted for the next step. → places [≤ R]

        Decided from past steps only. Called once a step.
        """
        count = len(waits.steps_since_draft)
        everyone = np.arange(count, dtype=np.int64)
        if not self.drafts:
            return everyone[:0]
        if self.mode is not VerificationMode.ADAPTIVE or self.costs is None:
            return everyone
        plan = self._drafting.plan(count, lambda: self._next_costs(count, load, claims))
        since = waits.steps_since_draft
        since += 1
        self._num_drafted_tokens = plan.num_tokens
        if plan.num_requests < count:  # a probe, or none
            chosen = np.argsort(-since, kind="stable")[: plan.num_requests]
        else:
            pairs = zip(waits.zero_budget_steps.tolist(), since.tolist(), strict=True)
            chosen = everyone[[should_draft(zero, steps, self._gate) for zero, steps in pairs]]
        since[chosen] = 0
        return np.asarray(chosen, dtype=np.int64)

    def draft_tokens(self) -> int:
        """How many tokens to draft for each of the requests last chosen by `to_draft`."""
        return self._num_drafted_tokens

    def note_draft(self, survival: FloatArray, measured_ms: float, width: int | None = None) -> None:
        """A step's fresh scores [R, γ], zero past the drafted tokens, and how long drafting took. width:
        drafted tokens, None: of the last choice; so below."""
        width = self._num_drafted_tokens if width is None else width
        self._recent.note(survival, width)
        self.drafting_took_ms = measured_ms

    def drafting_share(self, step: StepSize, num_drafting: int, width: int) -> float:
        """Of the time of a step and the drafting after it, as predicted: where only the whole is measured."""
        if self.costs is None or not num_drafting:
            return 0.0
        draft_ms = self.costs.draft_ms(num_drafting, width)
        return draft_ms / (self.costs.step_ms(step) + draft_ms)

    # -- costs -------------------------------------------------------------------------------------

    def note_step(
        self, step: StepSize, num_drafting: int, measured_ms: float, width: int | None = None
    ) -> float:
        """A step and the drafting after it took `measured_ms`. → the prediction, 0 while nothing is known"""
        draft_ms, self.drafting_took_ms = self.drafting_took_ms, 0.0
        if self.costs is None:
            return 0.0
        predicted_ms = self.costs.step_ms(step)
        self.costs.note_step(step, measured_ms - draft_ms)
        if num_drafting:
            width = self._num_drafted_tokens if width is None else width
            predicted_ms += self.costs.draft_ms(num_drafting, width)
            self.costs.note_draft(num_drafting, width, draft_ms)
        return predicted_ms

    def speculation_ms(
        self, step: StepSize, num_drafting: int, width: int | None = None
    ) -> tuple[float, float, float]:
        """What a step costs: its decoding requests without drafts, verification on top, drafting after it.
        Zeros where nothing is verified or known."""
        if self.costs is None or step.draft_rows == 0:
            return 0.0, 0.0, 0.0
        costs = self.costs
        num_decoding = step.decode_rows - step.draft_rows
        plain_ms = costs.step_ms(replace(step, decode_rows=num_decoding, draft_rows=0, prompt_rows=0))
        undrafted_ms = costs.step_ms(replace(step, decode_rows=num_decoding))
        verify_ms = costs.step_ms(step) - undrafted_ms
        width = self._num_drafted_tokens if width is None else width
        return plain_ms, verify_ms, costs.draft_ms(num_drafting, width)

    def rates(self, max_running: int) -> Rates:
        """Throughput by number of requests at the live mean survival; empty while costs are unknown."""
        if self.costs is None:
            return ()
        mean = self._recent.mean
        survival = np.zeros_like(mean) if self.mode is VerificationMode.OFF else mean
        return throughput_curve(survival, self.costs.table, self.costs.plain, request_counts(max_running))

    def prefill_ms_per_token(self) -> float:
        """What a prompt's token adds to a step, as long as there is room in it."""
        return 0.0 if self.table is None else self.table.prompt_row_ms(self._max_step_rows)

    def claims(self, rows: RowClaims) -> Claims | None:
        """What requests claim under the plan's terms; None where all count the same."""
        if not self.tiers or not len(rows.tiers):
            return None
        return claims_of(rows.tiers, rows.targets_per_s, self.tiers, self.target_boost)

    def _cost_ms(self, count: int, load: Load, max_tokens: int, draft_ms: float) -> NDArray[np.float64]:
        if self.costs is None:
            return np.ones(max_tokens + 1)
        return self.costs.curve(
            count,
            load.prefill_rows,
            max_tokens,
            load.context_tokens,
            draft_ms=draft_ms,
            whole_step=self.group_step_ms is not None,
        )

    def _draft_ms(self, num_requests: int, num_tokens: int) -> float:
        return 0.0 if self.costs is None else self.costs.draft_ms(num_requests, num_tokens)

    def _draft_ms_by_width(self, num_requests: int) -> list[float]:
        if self.costs is None:
            return [0.0] * (self.num_draft_tokens + 1)
        return self.costs.draft_ms_by_width(num_requests)

    def _next_costs(self, count: int, load: Load, claims: Claims | None) -> Costs:
        return Costs(
            verify_ms=self._cost_ms(count, load, count * self.num_draft_tokens, 0.0),
            draft_ms=self._draft_ms_by_width(count),
            group_step_ms=self.group_step_ms or 0.0,
            claims=claims,
        )
