"""How many draft tokens a step verifies, and who is drafted for the next one: `Speculation` on sequences."""

import numpy as np

from dspark_ray.core.config import SpeculationConfig
from dspark_ray.core.types import (
    SERVICE_TIERS,
    AcceptanceRule,
    FloatArray,
    IntArray,
    RowClaims,
    VerificationMode,
)
from dspark_ray.engine.sequence import Sequence
from dspark_ray.scheduling.lengths import LengthDecision
from dspark_ray.scheduling.speculation import Blocks, Load, Speculation, Waits
from dspark_ray.scheduling.step_table import StepTable
from dspark_ray.scheduling.utility import Claims


class BudgetPlanner(Speculation):
    """The engine's: what sequences bring to a step, and what they keep of it."""

    def __init__(self, config: SpeculationConfig, table: StepTable | None, max_step_rows: int) -> None:
        super().__init__(
            config.mode,
            config.num_draft_tokens,
            table,
            max_step_rows,
            fixed_tokens=config.fixed_tokens,
            threshold=config.threshold,
        )

    def choose(
        self, decoding: list[Sequence], room: list[int], load: Load, now_ms: float, *, explore: bool = False
    ) -> LengthDecision:
        """Lengths [R] for this step's decoding requests; room [R]: draft tokens that their blocks hold.
        `explore`: as in `Speculation.lengths`."""
        gamma, count = self.num_draft_tokens, len(decoding)
        current = np.zeros((count, gamma), dtype=np.float32)
        # Of greedy requests, and those with a seed, the same array: it is ranked once.
        rejection = [s.request.sampling.rule is AcceptanceRule.REJECTION for s in decoding]
        searched = np.zeros((count, gamma), dtype=np.float32) if any(rejection) else current
        max_lens = np.zeros(count, dtype=np.int64)
        for row, sequence in enumerate(decoding):
            if sequence.draft is None:
                continue
            current[row] = sequence.draft.survival
            searched[row] = self._searched_survival(sequence)
            # ℓ drafts emit up to ℓ + 1 tokens; more than what may still be emitted is waste.
            longest = min(len(sequence.draft.token_ids), sequence.remaining_tokens - 1, room[row])
            limit = sequence.request.sampling.max_draft_tokens
            max_lens[row] = longest if limit is None else min(longest, limit)
        waits = _waits(decoding)
        blocks = Blocks(current, searched, max_lens)
        decision = self.lengths(blocks, waits, load, now_ms, self._claims_of(decoding), explore=explore)
        for sequence, steps in zip(decoding, waits.zero_budget_steps.tolist(), strict=True):
            sequence.zero_budget_steps = steps
        return decision

    def choose_unseen(
        self, decoding: list[Sequence], max_lens: IntArray, pending: int, load: Load, now_ms: float
    ) -> int:
        """The budget of a step whose drafts nobody has read: tokens that the device gives to the highest of
        its own scores, `max_lens` [R] to a request at most. `note_length` follows when they are known.

        pending: drafts that were launched since the newest that the host has read.
        """
        searched = np.zeros((len(decoding), self.num_draft_tokens), dtype=np.float32)
        for row, sequence in enumerate(decoding):
            if max_lens[row]:
                searched[row] = self._old_survival(sequence, pending)
        blocks = Blocks(searched, searched, max_lens)
        return self.lengths(blocks, _waits(decoding), load, now_ms, self._claims_of(decoding)).budget

    def can_choose_unseen(self) -> bool:
        """Whether a budget says it all: the modes that stop at a score need to see it, and so do requests
        that count differently."""
        needs_scores = self.mode in (VerificationMode.THRESHOLD, VerificationMode.ALGORITHM1)
        return not needs_scores and not self.tiers

    def note_length(self, sequence: Sequence, length: int) -> None:
        """So many tokens of its draft were verified."""
        sequence.zero_budget_steps = 0 if length else sequence.zero_budget_steps + 1

    def wants_draft(self, decoding: list[Sequence], load: Load) -> list[Sequence]:
        """The requests to draft for the next step, decided from past steps only."""
        if not self.drafts:
            return []
        candidates = [
            s for s in decoding if s.remaining_tokens > 1 and s.request.sampling.max_draft_tokens != 0
        ]
        waits = _waits(candidates)
        chosen = self.to_draft(waits, load, self._claims_of(candidates))
        for sequence, steps in zip(candidates, waits.steps_since_draft.tolist(), strict=True):
            sequence.steps_since_draft = steps
        return [candidates[place] for place in chosen]

    def _searched_survival(self, sequence: Sequence) -> FloatArray:
        """What the budget is searched over: a block's own scores where no length can change the text."""
        assert sequence.draft is not None
        if sequence.request.sampling.rule is not AcceptanceRule.REJECTION:
            return sequence.draft.survival
        return self._old_survival(sequence, 0)

    def _old_survival(self, sequence: Sequence, pending: int) -> FloatArray:
        old = sequence.stale_survival(pending)
        return self.mean_survival if old is None else old

    def _claims_of(self, decoding: list[Sequence]) -> Claims | None:
        return self.claims(row_claims(decoding)) if self.tiers else None


def row_claims(sequences: list[Sequence]) -> RowClaims:
    """Tiers and wanted speeds of R requests, as reports carry them."""
    claims = [sequence.request.priority for sequence in sequences]
    tiers = np.array([SERVICE_TIERS.index(claim.tier) for claim in claims], dtype=np.int64)
    targets = np.array([claim.target_tokens_per_s or 0.0 for claim in claims], dtype=np.float32)
    return RowClaims(tiers, targets)


def _waits(sequences: list[Sequence]) -> Waits:
    def of(values: list[int]) -> IntArray:
        return np.array(values, dtype=np.int64)

    return Waits(of([s.zero_budget_steps for s in sequences]), of([s.steps_since_draft for s in sequences]))
