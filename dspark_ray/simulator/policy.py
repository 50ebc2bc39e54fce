"""The real policies on one replica's requests: what the engine's `BudgetPlanner` does, without a model.

Lengths, cost curve, gate, width, survival and the cap's bucket are the engine's own functions
(`dspark_ray.scheduling`); this file only feeds them. Drafts come from an `AcceptanceBank`.
"""

from dataclasses import dataclass

import numpy as np

from dspark_ray.core.types import FloatArray, IntArray, StepPlan, VerificationMode
from dspark_ray.scheduling.cap import TokenBucket, bucket_of_share
from dspark_ray.scheduling.gate import should_draft, speculation_pays
from dspark_ray.scheduling.lengths import LENGTH_RULES, LengthView
from dspark_ray.scheduling.step_table import StepTable, cost_curve
from dspark_ray.scheduling.width import DraftWidth
from dspark_ray.simulator.acceptance import AcceptanceBank

STALE_STEPS = 2  # the engine's: budgets come from scores of this many drafts ago
_PRIOR_SMOOTHING = 0.05
_SWITCH_PROBE_STEPS = 64


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """How much is verified; the keys of the same names in `speculation`."""

    mode: VerificationMode = VerificationMode.ADAPTIVE
    num_draft_tokens: int = 7
    fixed_tokens: int | None = None
    threshold: float = 0.4


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
        self._width = DraftWidth(gamma)
        self._prior = np.full(gamma, 0.5, dtype=np.float32)
        self._prior_queue: list[FloatArray] = []
        self._pays, self._steps_off = True, 0
        self.bucket: TokenBucket | None = None
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
        self.bucket = bucket_of_share(self.bucket, plan.draft_tokens_per_s, self.settings.num_draft_tokens)

    def verify(self, slots: IntArray, most: IntArray, load: Load, now_ms: float) -> Verified:
        """Lengths of this step's decoding requests, and what of them stands.

        slots [R]; most [R]: tokens that may be verified of each at most (the end of its answer).
        """
        count, gamma = len(slots), self.settings.num_draft_tokens
        max_lens = np.minimum(self._drafted[slots], np.maximum(most, 0))
        # A request without enough history enters the search with the live mean, as in the engine.
        old = self._num_scores[slots] > STALE_STEPS
        stale = np.where(old[:, None], self._scores[slots, STALE_STEPS], self._prior[None, :])
        drafting = self._drafted[slots] > 0
        stale = np.where(drafting[:, None], stale, 0.0).astype(np.float32)
        view = LengthView(
            current_survival=np.where(drafting[:, None], self._scores[slots, 0], 0.0).astype(np.float32),
            stale_survival=stale,
            max_lens=max_lens,
            base_rows=count + load.prefill_rows,
            num_decoding=count,
            cost_ms=self._cost_ms(count, load, int(max_lens.sum()), int((max_lens > 0).sum())),
            cap_tokens=self._cap(count, load, now_ms),
            fixed_tokens=self.settings.fixed_tokens if self.settings.mode is VerificationMode.FIXED else None,
            threshold=self.settings.threshold,
        )
        lens = LENGTH_RULES.get(self._rule())(view).lens
        if self.bucket is not None:
            self.bucket.take(int(lens.sum()))
        self._width.note(lens, max_lens)
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
        width, gamma = self._draft_tokens(), self.settings.num_draft_tokens
        scores = np.zeros((len(slots), gamma), dtype=np.float32)
        scores[:, :width] = self.bank.survival[self._place[slots], :width]
        self._scores[slots, 1:] = self._scores[slots, :-1]
        self._scores[slots, 0] = scores
        self._num_scores[slots] += 1
        self._drafted[slots] = (scores > 0).sum(axis=1)  # a recorded block may be shorter
        self.drafted_tokens += int(self._drafted[slots].sum())
        self._note_prior(scores[:, :width].mean(axis=0))
        return self.table.draft_cost_ms(len(slots) * width / gamma)

    def survival_report(self, slots: IntArray) -> FloatArray:
        """The scores that the engine would report of its decoding requests. → [≤ R, γ]"""
        known = slots[self._num_scores[slots] > STALE_STEPS]
        return np.asarray(self._scores[known, STALE_STEPS])

    def _wants_draft(self, slots: IntArray, load: Load) -> IntArray:
        settings = self.settings
        if settings.mode is VerificationMode.OFF or settings.fixed_tokens == 0:
            return slots[:0]
        if settings.mode is not VerificationMode.ADAPTIVE:
            return slots
        if not self._speculation_pays(len(slots), load):
            return slots[:0]
        self._since_draft[slots] += 1
        wanted = np.array(
            [
                should_draft(int(zero), int(since))
                for zero, since in zip(self._zero_steps[slots], self._since_draft[slots], strict=True)
            ],
            dtype=bool,
        )
        self._since_draft[slots[wanted]] = 0
        return slots[wanted]

    def _speculation_pays(self, count: int, load: Load) -> bool:
        if count == 0:
            return False
        cost = self._cost_ms(count, load, count * self.settings.num_draft_tokens, 0)
        draft_ms = self.table.draft_cost_ms(count * self._draft_tokens() / self.settings.num_draft_tokens)
        self._pays = speculation_pays(self._prior, count, cost, draft_ms, now_on=self._pays)
        self._steps_off = 0 if self._pays else self._steps_off + 1
        return self._pays or self._steps_off % _SWITCH_PROBE_STEPS == 0

    def _draft_tokens(self) -> int:
        if self.settings.mode is VerificationMode.FIXED:
            fixed = self.settings.fixed_tokens
            return self.settings.num_draft_tokens if fixed is None else max(1, fixed)
        return self._width.tokens()

    def _note_prior(self, mean: FloatArray) -> None:
        self._prior_queue.append(mean)
        if len(self._prior_queue) > STALE_STEPS:
            old = self._prior_queue.pop(0)
            self._prior[: len(old)] += _PRIOR_SMOOTHING * (old - self._prior[: len(old)])

    def _rule(self) -> str:
        searching = self.settings.mode in (VerificationMode.ADAPTIVE, VerificationMode.ALGORITHM1)
        return (
            VerificationMode.FIXED.value if searching and self.table.is_flat() else self.settings.mode.value
        )

    def _cost_ms(self, count: int, load: Load, max_tokens: int, num_drafting: int) -> np.ndarray:
        return cost_curve(
            self.table,
            None,
            base_rows=max(1, count + load.prefill_rows),
            max_draft_tokens=max_tokens,
            num_drafting=num_drafting * self._draft_tokens() / self.settings.num_draft_tokens,
            context_tokens=load.context_tokens,
        )

    def _cap(self, count: int, load: Load, now_ms: float) -> int:
        reserve = min(load.prefill_rows, self._max_step_rows // 4)
        room = max(0, self._max_step_rows - count - reserve)
        return room if self.bucket is None else min(room, self.bucket.available(now_ms))
