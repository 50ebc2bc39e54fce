"""How many draft tokens this step verifies, and who is drafted for the next one.

Lossless by construction (docs/architecture.md, "Losslessness"): budgets come from scores at least two
steps old, from the step table and from plans; the current block's scores only rank. Whether a request
is drafted at all is decided from past steps.
"""

from dataclasses import dataclass, replace

import numpy as np

from dspark_ray.core.config import SpeculationConfig
from dspark_ray.core.types import (
    SERVICE_TIERS,
    AcceptanceRule,
    FloatArray,
    RowClaims,
    TierTerms,
    VerificationMode,
)
from dspark_ray.engine.sequence import STALE_STEPS, Sequence
from dspark_ray.scheduling.cap import TokenBucket, draft_token_cap
from dspark_ray.scheduling.drafting import Costs, Drafting
from dspark_ray.scheduling.gate import GateSettings, should_draft
from dspark_ray.scheduling.lengths import LENGTH_RULES, LengthDecision, LengthView, length_rule
from dspark_ray.scheduling.live_costs import LiveCosts, StepSize
from dspark_ray.scheduling.load import Rates, request_counts, throughput_curve
from dspark_ray.scheduling.lockstep import within_step
from dspark_ray.scheduling.recent_survival import RecentSurvival
from dspark_ray.scheduling.step_table import StepTable
from dspark_ray.scheduling.utility import Claims, claims_of


@dataclass(frozen=True, slots=True)
class Load:
    """What a step holds besides draft tokens."""

    prefill_rows: int
    context_tokens: int  # cached keys that the decoding rows attend to


class BudgetPlanner:
    """Verification lengths under one configured mode; owns the scores' history across requests."""

    def __init__(self, config: SpeculationConfig, table: StepTable | None, max_step_rows: int) -> None:
        self.mode = config.mode
        self.num_draft_tokens = config.num_draft_tokens
        self.costs: LiveCosts | None = None
        self._max_step_rows = max_step_rows
        self.table = table
        # What couples this replica to others, while a plan holds.
        self.bucket: TokenBucket | None = None  # its share of the shared cap
        self.group_step_ms: float | None = None  # when its group's steps end
        self.tiers: tuple[TierTerms, ...] = ()
        self.target_boost = 0.0
        self.verified_in_full = False  # whether the last step's lengths were all that could be verified
        self._config = config
        self._gate = GateSettings()
        self._recent = RecentSurvival(config.num_draft_tokens, STALE_STEPS)
        self._drafting = Drafting(self._recent)
        self.drafting_took_ms = 0.0  # after the step at hand
        fixed = config.fixed_tokens if config.mode is VerificationMode.FIXED else None
        self._num_drafted_tokens = config.num_draft_tokens if fixed is None else max(1, fixed)

    @property
    def table(self) -> StepTable | None:
        """What steps cost; None: nothing is known, and everything is verified."""
        return None if self.costs is None else self.costs.table

    @table.setter
    def table(self, table: StepTable | None) -> None:
        self.costs = None if table is None else LiveCosts(table, self._max_step_rows, self.num_draft_tokens)

    def choose(
        self, decoding: list[Sequence], room: list[int], load: Load, now_ms: float, *, explore: bool = False
    ) -> LengthDecision:
        """Lengths [R] for this step's decoding requests; room [R]: draft tokens that their blocks hold.

        `explore`, decided from past steps, verifies whole drafts under any mode: outcomes to learn from that
        no score selected.
        """
        gamma, count = self.num_draft_tokens, len(decoding)
        self.verified_in_full = False
        if not any(s.draft is not None for s in decoding):
            return LengthDecision(np.zeros(count, dtype=np.int64), 0, float(count))
        current = np.zeros((count, gamma), dtype=np.float32)
        stale = np.zeros((count, gamma), dtype=np.float32)
        max_lens = np.zeros(count, dtype=np.int64)
        for row, sequence in enumerate(decoding):
            if sequence.draft is None:
                continue
            current[row] = sequence.draft.survival
            stale[row] = self._searched_survival(sequence)
            # ℓ drafts emit up to ℓ + 1 tokens; more than what may still be emitted is waste.
            longest = min(len(sequence.draft.token_ids), sequence.remaining_tokens - 1, room[row])
            limit = sequence.request.sampling.max_draft_tokens
            max_lens[row] = longest if limit is None else min(longest, limit)
        drafted_ms = self._draft_ms(int((max_lens > 0).sum()), self._num_drafted_tokens)
        cost_ms = self._cost_ms(count, load, int(max_lens.sum()), drafted_ms)
        cap_tokens = draft_token_cap(count, load.prefill_rows, self._max_step_rows, self.bucket, now_ms)
        if self.group_step_ms is not None and self.table is not None:
            cost_ms, free_tokens = within_step(cost_ms, self.group_step_ms)
            cap_tokens = min(cap_tokens, free_tokens)
        view = LengthView(
            current_survival=current,
            stale_survival=stale,
            max_lens=max_lens,
            base_rows=count + load.prefill_rows,
            num_decoding=count,
            cost_ms=cost_ms,
            cap_tokens=cap_tokens,
            fixed_tokens=self._config.fixed_tokens if self.mode is VerificationMode.FIXED else None,
            threshold=self._config.threshold,
            claims=self._claims(decoding),
        )
        rule = VerificationMode.FIXED.value if explore else length_rule(self.mode, self.table)
        decision = LENGTH_RULES.get(rule)(view)
        self.verified_in_full = rule == VerificationMode.FIXED.value and decision.budget == max_lens.sum()
        if self.bucket is not None:
            self.bucket.take(decision.budget)
        for sequence, length, wanted in zip(decoding, decision.lens, max_lens, strict=True):
            if wanted > 0 and not explore:
                sequence.zero_budget_steps = 0 if length else sequence.zero_budget_steps + 1
        return decision

    def wants_draft(self, decoding: list[Sequence], load: Load) -> list[Sequence]:
        """The requests to draft for the next step, decided from past steps only."""
        if self.mode is VerificationMode.OFF:
            return []
        if self.mode is VerificationMode.FIXED and self._config.fixed_tokens == 0:
            return []
        candidates = [
            s for s in decoding if s.remaining_tokens > 1 and s.request.sampling.max_draft_tokens != 0
        ]
        if self.mode is not VerificationMode.ADAPTIVE or self.costs is None:
            return candidates
        plan = self._drafting.plan(len(candidates), lambda: self._next_costs(candidates, load))
        for sequence in candidates:
            sequence.steps_since_draft += 1
        self._num_drafted_tokens = plan.num_tokens
        if plan.num_requests < len(candidates):  # a probe, or none
            candidates.sort(key=lambda s: -s.steps_since_draft)
            chosen = candidates[: plan.num_requests]
        else:
            chosen = [
                s for s in candidates if should_draft(s.zero_budget_steps, s.steps_since_draft, self._gate)
            ]
        for sequence in chosen:
            sequence.steps_since_draft = 0
        return chosen

    def draft_tokens(self) -> int:
        """How many tokens to draft for each of the requests last chosen by `wants_draft`."""
        return self._num_drafted_tokens

    def note_draft(self, survival: FloatArray, measured_ms: float) -> None:
        """A step's fresh scores [R, γ], zero past the drafted tokens, and how long drafting took."""
        self._recent.note(survival, self._num_drafted_tokens)
        self.drafting_took_ms = measured_ms

    def note_step(self, step: StepSize, num_drafting: int, measured_ms: float) -> float:
        """A step and the drafting after it took `measured_ms`. → the prediction, 0 while nothing is known"""
        draft_ms, self.drafting_took_ms = self.drafting_took_ms, 0.0
        if self.costs is None:
            return 0.0
        predicted_ms = self.costs.step_ms(step)
        self.costs.note_step(step, measured_ms - draft_ms)
        if num_drafting:
            predicted_ms += self.costs.draft_ms(num_drafting, self._num_drafted_tokens)
            self.costs.note_draft(num_drafting, self._num_drafted_tokens, draft_ms)
        return predicted_ms

    def speculation_ms(self, step: StepSize, num_drafting: int) -> tuple[float, float, float]:
        """What a step costs: its decoding requests without drafts, verification on top, drafting after it.
        Zeros where nothing is verified or known."""
        if self.costs is None or step.draft_rows == 0:
            return 0.0, 0.0, 0.0
        costs = self.costs
        num_decoding = step.decode_rows - step.draft_rows
        plain_ms = costs.step_ms(replace(step, decode_rows=num_decoding, draft_rows=0, prompt_rows=0))
        undrafted_ms = costs.step_ms(replace(step, decode_rows=num_decoding))
        verify_ms = costs.step_ms(step) - undrafted_ms
        return plain_ms, verify_ms, costs.draft_ms(num_drafting, self._num_drafted_tokens)

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

    def _cost_ms(self, count: int, load: Load, max_tokens: int, draft_ms: float) -> np.ndarray:
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

    def _next_costs(self, candidates: list[Sequence], load: Load) -> Costs:
        count, gamma = len(candidates), self.num_draft_tokens
        return Costs(
            verify_ms=self._cost_ms(count, load, count * gamma, 0.0),
            draft_ms=[self._draft_ms(count, width) for width in range(gamma + 1)],
            group_step_ms=self.group_step_ms or 0.0,
            claims=self._claims(candidates),
        )

    def _searched_survival(self, sequence: Sequence) -> FloatArray:
        """What the budget is searched over: a block's own scores where no length can change the text."""
        assert sequence.draft is not None
        if sequence.request.sampling.rule is not AcceptanceRule.REJECTION:
            return sequence.draft.survival
        old = sequence.stale_survival()
        return self._recent.mean if old is None else old

    def _claims(self, decoding: list[Sequence]) -> Claims | None:
        """What requests claim under the plan's terms; None where all count the same."""
        if not self.tiers or not decoding:
            return None
        claims = row_claims(decoding)
        return claims_of(claims.tiers, claims.targets_per_s, self.tiers, self.target_boost)


def row_claims(sequences: list[Sequence]) -> RowClaims:
    """Tiers and wanted speeds of R requests, as reports carry them."""
    claims = [sequence.request.priority for sequence in sequences]
    tiers = np.array([SERVICE_TIERS.index(claim.tier) for claim in claims], dtype=np.int64)
    targets = np.array([claim.target_tokens_per_s or 0.0 for claim in claims], dtype=np.float32)
    return RowClaims(tiers, targets)
