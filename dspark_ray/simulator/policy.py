"""The real policies on one replica's requests: the engine's `Speculation`, without a model.

Slots take the place of the engine's sequences, an `AcceptanceBank` that of the drafter and the target, and
`StepTimes` that of the clock: costs are corrected by the steps as they went, as in the engine.
"""

from dataclasses import dataclass

import numpy as np

from dspark_ray.core.types import FloatArray, IntArray, RowClaims, StepPlan, TierTerms, VerificationMode
from dspark_ray.scheduling.live_costs import StepSize
from dspark_ray.scheduling.speculation import STALE_STEPS, Blocks, Load, Speculation, Waits
from dspark_ray.scheduling.step_table import StepTable
from dspark_ray.scheduling.utility import Claims
from dspark_ray.simulator.acceptance import AcceptanceBank
from dspark_ray.simulator.step_times import Disturbances, StepTimes


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
class Verified:
    """One step's verification, by decoding request."""

    lens: IntArray  # [R]
    accepted: IntArray  # [R]


@dataclass(frozen=True, slots=True)
class Ended:
    """What a step took."""

    measured_ms: float  # as an engine measures it: drafting included, and not what is between two steps
    total_ms: float  # to the beginning of the next one


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
        times: StepTimes | None = None,
    ) -> None:
        """table: what steps cost, as far as is known; times: what they take (None: that)."""
        self.settings, self.bank = settings, bank
        gamma = settings.num_draft_tokens
        self._rng = rng
        self._times = times or StepTimes(table)
        self._disturbances = Disturbances(self._times.scatter, rng)
        self._speculation = Speculation(
            settings.mode,
            gamma,
            table,
            max_step_rows,
            fixed_tokens=settings.fixed_tokens,
            threshold=settings.threshold,
        )
        self._speculation.tiers, self._speculation.target_boost = settings.tiers, settings.target_boost
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
        """A plan of the central scheduler."""
        self._speculation.couple(plan)

    def verify(self, slots: IntArray, remaining: IntArray, load: Load, now_ms: float) -> Verified:
        """Lengths of this step's decoding requests, and what of them stands.

        slots [R]; remaining [R]: tokens that each may still emit.
        """
        drafting = (self._drafted[slots] > 0)[:, None]
        blocks = Blocks(
            current=np.where(drafting, self._scores[slots, 0], 0.0).astype(np.float32),
            searched=np.where(drafting, self._searched(slots), 0.0).astype(np.float32),
            max_lens=np.minimum(self._drafted[slots], np.maximum(remaining - 1, 0)),
        )
        waits = Waits(self._zero_steps[slots], self._since_draft[slots])
        decision = self._speculation.lengths(blocks, waits, load, now_ms, self._claims(slots))
        self._zero_steps[slots] = waits.zero_budget_steps
        accepted = np.minimum(decision.lens, self.bank.accepted[self._place[slots]])
        verified = np.arange(self.settings.num_draft_tokens) < decision.lens[:, None]
        self._speculation.note_outcomes(float(blocks.current[verified].sum()), int(accepted.sum()))
        self._drafted[slots] = 0
        assert decision.lens.max(initial=0) <= self.settings.num_draft_tokens
        return Verified(decision.lens, accepted)

    def finish(self, step: StepSize, slots: IntArray, remaining: IntArray, load: Load) -> Ended:
        """Drafts for the next step, and notes what this one took.

        slots [R] that decode in the next step, and the tokens that each may still emit; load: of that step,
        as far as it is known.
        """
        disturbance = self._disturbances.next()
        num_drafted = self._draft(slots, remaining, load, disturbance)
        measured_ms = disturbance * self._times.step_ms(step) + self._speculation.drafting_took_ms
        self._speculation.note_step(step, num_drafted, measured_ms)
        return Ended(measured_ms, measured_ms + self._times.pause_ms(step.decode_rows - step.draft_rows))

    def survival_report(self, slots: IntArray) -> tuple[FloatArray, IntArray]:
        """The scores that the engine would report of its decoding requests, and whose. → [≤ R, γ], [≤ R]"""
        known = slots[self._num_scores[slots] > STALE_STEPS]
        return np.asarray(self._scores[known, STALE_STEPS]), known

    def _draft(self, slots: IntArray, remaining: IntArray, load: Load, disturbance: float) -> int:
        """→ how many requests were drafted"""
        self._place[slots] = self.bank.next(self._place[slots], self._task[slots])
        speculation, gamma = self._speculation, self.settings.num_draft_tokens
        if not speculation.drafts:
            return 0
        slots = slots[remaining > 1]
        waits = Waits(self._zero_steps[slots], self._since_draft[slots])
        chosen = speculation.to_draft(waits, load, self._claims(slots))
        self._since_draft[slots] = waits.steps_since_draft
        slots = slots[chosen]
        if not len(slots):
            return 0
        width = speculation.draft_tokens()
        scores = np.zeros((len(slots), gamma), dtype=np.float32)
        scores[:, :width] = self.bank.survival[self._place[slots], :width]
        self._scores[slots, 1:] = self._scores[slots, :-1]
        self._scores[slots, 0] = scores
        self._num_scores[slots] += 1
        self._drafted[slots] = (scores > 0).sum(axis=1)  # a recorded block may be shorter
        self.drafted_tokens += int(self._drafted[slots].sum())
        speculation.note_draft(scores, disturbance * self._times.draft_ms(len(slots), width / gamma))
        return len(slots)

    def _searched(self, slots: IntArray) -> FloatArray:
        """What the budget is searched over, as in the engine: a request without enough history enters with
        the live mean. [R, γ]"""
        if self.settings.current_scores:
            return np.asarray(self._scores[slots, 0])
        old = self._num_scores[slots] > STALE_STEPS
        mean = self._speculation.mean_survival
        return np.where(old[:, None], self._scores[slots, STALE_STEPS], mean[None, :])

    def _claims(self, slots: IntArray) -> Claims | None:
        """What requests claim under the scheduler's terms; None where all count the same."""
        of_tasks = self.settings.task_claims
        if of_tasks is None:
            return None
        tasks = self._task[slots]
        return self._speculation.claims(RowClaims(of_tasks.tiers[tasks], of_tasks.targets_per_s[tasks]))
