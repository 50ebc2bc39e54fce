"""The real policies on one replica's requests: what the engine's `BudgetPlanner` does, without a model.

Lengths, costs, drafting, gate and the cap's bucket are the engine's own
(`dspark_ray.scheduling`); this file only feeds them. Drafts come from an `AcceptanceBank`.
"""

from dataclasses import dataclass

import numpy as np

from dspark_ray.core.types import FloatArray, IntArray, RowClaims, StepPlan, TierTerms, VerificationMode
from dspark_ray.scheduling.cap import TokenBucket, bucket_of_share, draft_token_cap
from dspark_ray.scheduling.drafting import Costs, Drafting
from dspark_ray.scheduling.gate import should_draft
from dspark_ray.scheduling.lengths import LENGTH_RULES, LengthView, length_rule
from dspark_ray.scheduling.live_costs import LiveCosts
from dspark_ray.scheduling.lockstep import within_step
from dspark_ray.scheduling.recent_survival import RecentSurvival
from dspark_ray.scheduling.step_table import StepTable
from dspark_ray.scheduling.utility import Claims, claims_of
from dspark_ray.simulator.acceptance import AcceptanceBank

STALE_STEPS = 2  # the engine's: budgets come from scores of this many drafts ago


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """How much is verified; the keys of the same names in `speculation`."""

    mode: VerificationMode = VerificationMode.ADAPTIVE
    num_draft_tokens: int = 7
    fixed_tokens: int | None = None
    threshold: float = 0.4
    current_scores: bool = True  # the search sees the blocks' own: greedy requests, and those with a seed
    # What couples requests that are not equal (scheduler: weighted); no tiers: all count the same.
    tiers: tuple[TierTerms, ...] = ()
    target_boost: float = 0.0
    task_claims: RowClaims | None = None  # of each task's requests; [tasks] instead of [R]


@dataclass(frozen=True, slots=True)
class Load:
    """What a step holds besides draft tokens."""

    prefill_rows: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Verified:
    """One step's verification, by decoding request."""

    lens: IntArray  # [R]
    accepted: IntArray  # [R]


class ReplicaPolicy:
    """One replica's speculation, request by request. Slots are the places of its running requests."""

    def __init__(
        self,
        settings: SpeculationSettings,
        table: StepTable,
        bank: AcceptanceBank,
        *,
        num_slots: int,
        max_step_rows: int,
        rng: np.random.Generator,
    ) -> None:
        self.settings, self.table, self.bank = settings, table, bank
        self._max_step_rows, self._rng = max_step_rows, rng
        gamma = settings.num_draft_tokens
        self._costs = LiveCosts(table, max_step_rows, gamma)
        self._recent = RecentSurvival(gamma, STALE_STEPS)
        self._drafting = Drafting(self._recent)
        fixed = settings.fixed_tokens if settings.mode is VerificationMode.FIXED else None
        self._num_drafted_tokens = gamma if fixed is None else max(1, fixed)
        self.bucket: TokenBucket | None = None
        self.group_step_ms: float | None = None  # when the group's steps end
        self.drafted_tokens = 0
        self._task = np.zeros(num_slots, dtype=np.int64)
        self._place = np.zeros(num_slots, dtype=np.int64)  # of the block at hand, in the bank
        self._drafted = np.zeros(num_slots, dtype=np.int64)  # tokens of the draft at hand; 0: none
        self._scores = np.zeros((num_slots, STALE_STEPS + 1, gamma), dtype=np.float32)  # newest first
        self._num_scores = np.zeros(num_slots, dtype=np.int64)
        self._zero_steps = np.zeros(num_slots, dtype=np.int64)
        self._since_draft = np.zeros(num_slots, dtype=np.int64)

    def start(self, slots: IntArray, tasks: IntArray) -> None:
        """New requests in these slots."""
        self._task[slots] = tasks
        self._place[slots] = self.bank.start(tasks, self._rng)
        for state in (self._drafted, self._num_scores, self._zero_steps, self._since_draft):
            state[slots] = 0

    def apply(self, plan: StepPlan) -> None:
        """A plan of the central scheduler, as the engine's `Coupling` takes it."""
        self.group_step_ms = plan.group_step_ms
        self.bucket = bucket_of_share(self.bucket, plan.draft_tokens_per_s, self.settings.num_draft_tokens)

    def verify(self, slots: IntArray, most: IntArray, load: Load, now_ms: float) -> Verified:
        """Lengths of this step's decoding requests, and what of them stands.

        slots [R]; most [R]: tokens that may be verified of each at most (the end of its answer).
        """
        count, gamma = len(slots), self.settings.num_draft_tokens
        max_lens = np.minimum(self._drafted[slots], np.maximum(most, 0))
        drafting = (self._drafted[slots] > 0)[:, None]
        drafted_ms = self._costs.draft_ms(int((max_lens > 0).sum()), self._num_drafted_tokens)
        cost_ms = self._cost_ms(count, load, int(max_lens.sum()), drafted_ms)
        cap_tokens = draft_token_cap(count, load.prefill_rows, self._max_step_rows, self.bucket, now_ms)
        if self.group_step_ms is not None:
            cost_ms, free_tokens = within_step(cost_ms, self.group_step_ms)
            cap_tokens = min(cap_tokens, free_tokens)
        view = LengthView(
            current_survival=np.where(drafting, self._scores[slots, 0], 0.0).astype(np.float32),
            stale_survival=np.where(drafting, self._searched(slots), 0.0).astype(np.float32),
            max_lens=max_lens,
            base_rows=count + load.prefill_rows,
            num_decoding=count,
            cost_ms=cost_ms,
            cap_tokens=cap_tokens,
            fixed_tokens=self.settings.fixed_tokens if self.settings.mode is VerificationMode.FIXED else None,
            threshold=self.settings.threshold,
            claims=self._claims(slots),
        )
        lens = LENGTH_RULES.get(length_rule(self.settings.mode, self.table))(view).lens
        if self.bucket is not None:
            self.bucket.take(int(lens.sum()))
        had = max_lens > 0
        zero = np.where(lens > 0, 0, self._zero_steps[slots] + 1)
        self._zero_steps[slots] = np.where(had, zero, self._zero_steps[slots])
        accepted = np.minimum(lens, self.bank.accepted[self._place[slots]])
        self._drafted[slots] = 0
        assert lens.max(initial=0) <= gamma
        return Verified(lens, accepted)

    def draft(self, slots: IntArray, remaining: IntArray, load: Load) -> float:
        """Drafts for the next step, for the requests worth it. slots [R] decoding now → ms"""
        self._place[slots] = self.bank.next(self._place[slots], self._task[slots])
        slots = self._wants_draft(slots[remaining > 1], load)
        if not len(slots):
            return 0.0
        width, gamma = self._num_drafted_tokens, self.settings.num_draft_tokens
        scores = np.zeros((len(slots), gamma), dtype=np.float32)
        scores[:, :width] = self.bank.survival[self._place[slots], :width]
        self._scores[slots, 1:] = self._scores[slots, :-1]
        self._scores[slots, 0] = scores
        self._num_scores[slots] += 1
        self._drafted[slots] = (scores > 0).sum(axis=1)  # a recorded block may be shorter
        self.drafted_tokens += int(self._drafted[slots].sum())
        self._recent.note(scores, width)
        return self._costs.draft_ms(len(slots), width)

    def survival_report(self, slots: IntArray) -> tuple[FloatArray, IntArray]:
        """The scores that the engine would report of its decoding requests, and whose. → [≤ R, γ], [≤ R]"""
        known = slots[self._num_scores[slots] > STALE_STEPS]
        return np.asarray(self._scores[known, STALE_STEPS]), known

    def _searched(self, slots: IntArray) -> FloatArray:
        """What the budget is searched over, as in the engine: a request without enough history enters with
        the live mean. [R, γ]"""
        if self.settings.current_scores:
            return np.asarray(self._scores[slots, 0])
        old = self._num_scores[slots] > STALE_STEPS
        return np.where(old[:, None], self._scores[slots, STALE_STEPS], self._recent.mean[None, :])

    def _wants_draft(self, slots: IntArray, load: Load) -> IntArray:
        settings = self.settings
        if settings.mode is VerificationMode.OFF or settings.fixed_tokens == 0:
            return slots[:0]
        if settings.mode is not VerificationMode.ADAPTIVE:
            return slots
        plan = self._drafting.plan(len(slots), lambda: self._next_costs(slots, load))
        self._since_draft[slots] += 1
        self._num_drafted_tokens = plan.num_tokens
        if plan.num_requests < len(slots):  # a probe, or none
            chosen = slots[np.argsort(-self._since_draft[slots], kind="stable")[: plan.num_requests]]
        else:
            zero, since = self._zero_steps[slots], self._since_draft[slots]
            chosen = slots[[should_draft(int(z), int(n)) for z, n in zip(zero, since, strict=True)]]
        self._since_draft[chosen] = 0
        return chosen

    def _cost_ms(self, count: int, load: Load, max_tokens: int, draft_ms: float) -> np.ndarray:
        return self._costs.curve(
            count,
            load.prefill_rows,
            max_tokens,
            load.context_tokens,
            draft_ms=draft_ms,
            whole_step=self.group_step_ms is not None,
        )

    def _next_costs(self, slots: IntArray, load: Load) -> Costs:
        count, gamma = len(slots), self.settings.num_draft_tokens
        return Costs(
            verify_ms=self._cost_ms(count, load, count * gamma, 0.0),
            draft_ms=[self._costs.draft_ms(count, width) for width in range(gamma + 1)],
            group_step_ms=self.group_step_ms or 0.0,
            claims=self._claims(slots),
        )

    def _claims(self, slots: IntArray) -> Claims | None:
        """What requests claim under the scheduler's terms; None where all count the same."""
        settings = self.settings
        if not settings.tiers or settings.task_claims is None or not len(slots):
            return None
        tasks = self._task[slots]
        of_tasks = settings.task_claims
        return claims_of(
            of_tasks.tiers[tasks], of_tasks.targets_per_s[tasks], settings.tiers, settings.target_boost
        )
