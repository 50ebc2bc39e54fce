"""How many draft tokens this step verifies, and who is drafted for the next one.

Lossless by construction (docs/architecture.md, "Losslessness"): budgets come from scores at least two
steps old, from the step table and from plans; the current block's scores only rank. Whether a request
is drafted at all is decided from past steps.
"""

from dataclasses import dataclass

import numpy as np

from dspark_ray.core.config import SpeculationConfig
from dspark_ray.core.types import SERVICE_TIERS, FloatArray, RowClaims, TierTerms, VerificationMode
from dspark_ray.engine.sequence import STALE_STEPS, Sequence
from dspark_ray.scheduling.cap import TokenBucket
from dspark_ray.scheduling.correction import OnlineCorrection
from dspark_ray.scheduling.gate import GateSettings, should_draft, speculation_pays
from dspark_ray.scheduling.lengths import LENGTH_RULES, LengthDecision, LengthView
from dspark_ray.scheduling.load import Rates, request_counts, throughput_curve
from dspark_ray.scheduling.lockstep import within_step
from dspark_ray.scheduling.step_table import StepTable, cost_curve
from dspark_ray.scheduling.utility import Claims, claims_of
from dspark_ray.scheduling.width import DraftWidth

_PRIOR_SMOOTHING = 0.05  # weight of one step's mean survival in the prior of a new request
_SWITCH_PROBE_STEPS = 64  # with speculation switched off, one step in so many drafts, to keep learning


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
        self.table = table
        self.correction = OnlineCorrection()
        # What couples this replica to others, while a plan holds.
        self.bucket: TokenBucket | None = None  # its share of the shared cap
        self.group_step_ms: float | None = None  # when its group's steps end
        self.tiers: tuple[TierTerms, ...] = ()
        self.target_boost = 0.0
        self.verified_in_full = False  # whether the last step's lengths were all that could be verified
        self._config = config
        self._max_step_rows = max_step_rows
        self._gate = GateSettings()
        self._prior = np.full(
            config.num_draft_tokens, 0.5, dtype=np.float32
        )  # mean survival, old drafts only
        self._prior_queue: list[FloatArray] = []
        self._width = DraftWidth(config.num_draft_tokens)
        self._pays = True
        self._steps_switched_off = 0

    def choose(
        self, decoding: list[Sequence], room: list[int], load: Load, now_ms: float, *, explore: bool = False
    ) -> LengthDecision:
        """Lengths [R] for this step's decoding requests; room [R]: draft tokens that their blocks hold.

        `explore`, decided from past steps, verifies whole drafts under any mode: outcomes to learn from that
        no score selected.
        """
        gamma, count = self.num_draft_tokens, len(decoding)
        current = np.zeros((count, gamma), dtype=np.float32)
        stale = np.zeros((count, gamma), dtype=np.float32)
        max_lens = np.zeros(count, dtype=np.int64)
        for row, sequence in enumerate(decoding):
            if sequence.draft is None:
                continue
            current[row] = sequence.draft.survival
            old = sequence.stale_survival()
            stale[row] = self._prior if old is None else old
            # ℓ drafts emit up to ℓ + 1 tokens; more than what may still be emitted is waste.
            longest = min(len(sequence.draft.token_ids), sequence.remaining_tokens - 1, room[row])
            limit = sequence.request.sampling.max_draft_tokens
            max_lens[row] = longest if limit is None else min(longest, limit)
        cost_ms = self._cost_ms(count, load, int(max_lens.sum()), int((max_lens > 0).sum()))
        cap_tokens = self._cap(count, load, now_ms)
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
        rule = VerificationMode.FIXED.value if explore else self._rule()
        decision = LENGTH_RULES.get(rule)(view)
        self.verified_in_full = rule == VerificationMode.FIXED.value and decision.budget == max_lens.sum()
        if self.bucket is not None:
            self.bucket.take(decision.budget)
        if not explore:  # says nothing of what is worth verifying
            self._width.note(decision.lens, max_lens)
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
        if self.mode is not VerificationMode.ADAPTIVE:
            return candidates
        if not self._speculation_pays(candidates, load, self._claims(candidates)):
            return []
        chosen = []
        for sequence in candidates:
            sequence.steps_since_draft += 1
            if should_draft(sequence.zero_budget_steps, sequence.steps_since_draft, self._gate):
                sequence.steps_since_draft = 0
                chosen.append(sequence)
        return chosen

    def draft_tokens(self) -> int:
        """How many tokens to draft for each request, from past steps only."""
        if self.mode is VerificationMode.FIXED:
            fixed = self._config.fixed_tokens
            return self.num_draft_tokens if fixed is None else max(1, fixed)
        return self._width.tokens()

    def note_draft(self, survival: FloatArray, width: int) -> None:
        """A step's fresh scores [R, γ], zero from `width` on; they reach the prior once two steps old."""
        self._prior_queue.append(survival[:, :width].mean(axis=0))
        if len(self._prior_queue) > STALE_STEPS:
            old = self._prior_queue.pop(0)
            self._prior[: len(old)] += _PRIOR_SMOOTHING * (old - self._prior[: len(old)])

    def draft_ms(self, num_requests: int) -> float:
        """Predicted time to draft for that many requests at the present width."""
        if self.table is None:
            return 0.0
        return self.table.draft_cost_ms(num_requests * self.draft_tokens() / self.num_draft_tokens)

    def predict_ms(self, rows: int, num_drafting: int, context_tokens: int) -> tuple[float, float]:
        """(table's, corrected) time of a step of `rows` rows and the drafting after it."""
        if self.table is None:
            return 0.0, 0.0
        verify = self.table.verify_cost_ms(rows, context_tokens)
        draft = self.draft_ms(num_drafting)
        factor = float(self.correction.factor(np.array([rows]))[0])
        return verify, verify * factor + draft

    def rates(self, max_running: int) -> Rates:
        """Throughput by number of requests at the live mean survival; empty while costs are unknown."""
        if self.table is None:
            return ()
        survival = np.zeros_like(self._prior) if self.mode is VerificationMode.OFF else self._prior
        return throughput_curve(survival, self.table, self.correction, request_counts(max_running))

    def prefill_ms_per_token(self) -> float:
        """What a prompt's token adds to a step, as long as there is room in it."""
        if self.table is None or self._max_step_rows < 2:
            return 0.0
        whole_ms = self.table.verify_cost_ms(self._max_step_rows) - self.table.verify_cost_ms(1)
        return whole_ms / (self._max_step_rows - 1)

    def _rule(self) -> str:
        # No table, or a flat one: nothing is known to cost anything, so everything is verified.
        if self.mode in (VerificationMode.ADAPTIVE, VerificationMode.ALGORITHM1) and (
            self.table is None or self.table.is_flat()
        ):
            return VerificationMode.FIXED.value
        return self.mode.value

    def _cost_ms(self, count: int, load: Load, max_tokens: int, num_drafting: int) -> np.ndarray:
        if self.table is None:
            return np.ones(max_tokens + 1)
        return cost_curve(
            self.table,
            self.correction,
            base_rows=max(1, count + load.prefill_rows),
            max_draft_tokens=max_tokens,
            num_drafting=num_drafting * self.draft_tokens() / self.num_draft_tokens,
            context_tokens=load.context_tokens,
        )

    def _cap(self, count: int, load: Load, now_ms: float) -> int:
        """Draft tokens that fit in the step's rows, and in the shared cap's share if there is one."""
        reserve = min(load.prefill_rows, self._max_step_rows // 4)  # prefill is never starved by drafts
        room = max(0, self._max_step_rows - count - reserve)
        return room if self.bucket is None else min(room, self.bucket.available(now_ms))

    def _claims(self, decoding: list[Sequence]) -> Claims | None:
        """What requests claim under the plan's terms; None where all count the same."""
        if not self.tiers or not decoding:
            return None
        claims = row_claims(decoding)
        return claims_of(claims.tiers, claims.targets_per_s, self.tiers, self.target_boost)

    def _speculation_pays(self, candidates: list[Sequence], load: Load, claims: Claims | None) -> bool:
        """Whether drafting is worth its own cost at this load; off, it is tried once in a while."""
        count = len(candidates)
        if self.table is None or count == 0:
            return count > 0
        cost = self._cost_ms(count, load, count * self.num_draft_tokens, 0)
        self._pays = speculation_pays(
            self._prior,
            count,
            cost,
            self.draft_ms(count),
            now_on=self._pays,
            claims=claims,
            group_step_ms=self.group_step_ms or 0.0,
        )
        if self._pays:
            self._steps_switched_off = 0
            return True
        self._steps_switched_off += 1
        return self._steps_switched_off % _SWITCH_PROBE_STEPS == 0


def row_claims(sequences: list[Sequence]) -> RowClaims:
    """Tiers and wanted speeds of R requests, as reports carry them."""
    claims = [sequence.request.priority for sequence in sequences]
    tiers = np.array([SERVICE_TIERS.index(claim.tier) for claim in claims], dtype=np.int64)
    targets = np.array([claim.target_tokens_per_s or 0.0 for claim in claims], dtype=np.float32)
    return RowClaims(tiers, targets)
