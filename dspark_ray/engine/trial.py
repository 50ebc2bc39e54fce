"""Two drafters on one engine: a candidate takes a share of the requests until it has shown what it is worth.

Both store the context of every row, so that either may draft any request; each request keeps its drafter. A
drafter is worth the tokens that a step with it yields in the time that such a step takes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from dspark_ray.core.clock import Clock
from dspark_ray.core.types import ArmStats
from dspark_ray.models.drafters.base import ContextRows, DraftBlock, Drafter, DraftRequest, Outcome
from dspark_ray.scheduling.step_table import StepTable

FIRST_LOOK = 256  # judged drafts of either before the first verdict; then at twice as many, and so on
LAST_LOOK = 8192  # a candidate that is not clearly better by then is none
CLEARLY = 3.0  # standard errors: several looks at numbers that come in bunches, a request each
_GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it, modulo 1, spread evenly however few they are


class Verdict(StrEnum):
    """What a trial says."""

    UNDECIDED = "undecided"
    BETTER = "better"
    WORSE = "worse"
    NO_BETTER = "no better"


@dataclass(slots=True)
class _Arm:
    """One drafter and what was seen of it."""

    drafter: Drafter
    taps: list[int]  # its columns' places among the taps of both
    num_drafts: int = 0
    tokens: int = 0  # emitted by steps that judged its drafts
    tokens_squared: int = 0
    verified: int = 0
    draft_ms: float = 0.0
    table_draft_ms: float = 0.0  # what the table gives for the same drafting
    num_calls: int = 0
    commit_ms: float = 0.0

    @property
    def tau(self) -> float:
        return self.tokens / self.num_drafts if self.num_drafts else 0.0

    @property
    def tau_error(self) -> float | None:
        """Standard error of τ, as if drafts were independent; None before there are two."""
        if self.num_drafts < 2:
            return None
        variance = self.tokens_squared / self.num_drafts - self.tau**2
        return math.sqrt(max(variance, 0.0) / self.num_drafts)


@dataclass(frozen=True, slots=True)
class _Note:
    """With a draft, until its outcome."""

    arm: int
    inner: object


class DrafterTrial:
    """A `Drafter` made of two: `current`, and `candidate` for a share of the requests."""

    def __init__(
        self,
        current: Drafter,
        candidate: Drafter,
        share: float,
        table: StepTable | None,
        vocab_size: int,
        clock: Clock,
    ) -> None:
        self.share = share
        self.num_draft_tokens = current.num_draft_tokens
        self.taps = tuple(sorted({*current.taps, *candidate.taps}))
        self.context_digests = tuple(dict.fromkeys((*current.context_digests, *candidate.context_digests)))
        self._arms = [
            _Arm(drafter, [self.taps.index(tap) for tap in drafter.taps]) for drafter in (current, candidate)
        ]
        self._shares_context = current.context_digests == candidate.context_digests
        self.vocab_map = current.vocab_map if _same(current.vocab_map, candidate.vocab_map) else None
        self._expands = self.vocab_map is None
        self._vocab_size = vocab_size
        self._table, self._clock = table, clock
        self._num_steps = self._num_drafting = 0
        self._next_look = FIRST_LOOK

    @property
    def current(self) -> Drafter:
        return self._arms[0].drafter

    @property
    def candidate(self) -> Drafter:
        return self._arms[1].drafter

    def commit(self, rows: ContextRows) -> None:
        width = rows.taps.shape[1] // max(1, len(self.taps))
        # New temperatures alone leave the context as it is.
        for arm in self._arms[:1] if self._shares_context else self._arms:
            started_ms = self._clock.now_ms()
            taps = rows.taps.view(len(rows.taps), -1, width)[:, arm.taps] if width else rows.taps
            arm.drafter.commit(replace(rows, taps=taps.reshape(len(rows.taps), -1)))
            arm.commit_ms += self._clock.now_ms() - started_ms
        self._num_steps += 1

    def propose(self, requests: Sequence[DraftRequest]) -> DraftBlock:
        arms = [int(request.number * _GOLDEN % 1.0 < self.share) for request in requests]
        width = len(requests[0].uniforms)
        token_ids: list[list[int]] = [[] for _ in requests]
        confidences = np.zeros((len(requests), width), dtype=np.float32)
        draft_probs: list[Tensor | None] = [None] * len(requests)
        notes: list[object] = [None] * len(requests)
        for index, arm in enumerate(self._arms):
            rows = [row for row, chosen in enumerate(arms) if chosen == index]
            if not rows:
                continue
            block = self._timed_block(arm, [requests[row] for row in rows], width)
            confidences[rows] = block.confidences
            for place, row in enumerate(rows):
                token_ids[row] = block.token_ids[place]
                draft_probs[row] = self._probs(arm.drafter, block.draft_probs[place])
                notes[row] = _Note(index, None if block.notes is None else block.notes[place])
        self._num_drafting += len(requests)
        return DraftBlock(token_ids, confidences, draft_probs, notes=notes)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for index, arm in enumerate(self._arms):
            own = [o for o in outcomes if isinstance(o.note, _Note) and o.note.arm == index]
            for outcome in own:
                emitted = outcome.num_accepted + 1
                arm.num_drafts += 1
                arm.tokens += emitted
                arm.tokens_squared += emitted**2
                arm.verified += outcome.num_verified
            arm.drafter.observe([replace(o, note=o.note.inner) for o in own if isinstance(o.note, _Note)])

    def wants_full_verification(self) -> bool:
        wishes = [arm.drafter.wants_full_verification() for arm in self._arms]  # each counts its steps
        return any(wishes)

    def describe(self) -> str:
        return f"{self.current.describe()}; {self.share:.0%} of requests: {self.candidate.describe()}"

    def look(self) -> Verdict:
        """The verdict, from past steps only; it is looked for rarely, so that chance has few occasions."""
        seen = min(arm.num_drafts for arm in self._arms)
        if seen < self._next_look:
            return Verdict.UNDECIDED
        self._next_look *= 2
        current, candidate = self.stats()
        difference = candidate.tokens_per_ms - current.tokens_per_ms
        error = math.hypot(current.error or 0.0, candidate.error or 0.0)
        if difference > CLEARLY * error:
            return Verdict.BETTER
        if difference < -CLEARLY * error:
            return Verdict.WORSE
        return Verdict.NO_BETTER if seen >= LAST_LOOK else Verdict.UNDECIDED

    def stats(self) -> tuple[ArmStats, ArmStats]:
        """Of the current drafter and of the candidate."""
        current, candidate = (self._stats(arm) for arm in self._arms)
        return current, candidate

    def draft_cost_ratio(self) -> float:
        """Time of the candidate's drafting over the current one's for the same requests; 1 if unknown."""
        ratios = [arm.draft_ms / arm.table_draft_ms if arm.table_draft_ms else 0.0 for arm in self._arms]
        return ratios[1] / ratios[0] if min(ratios) > 0 else 1.0

    def _stats(self, arm: _Arm) -> ArmStats:
        step_ms = self._step_ms(arm)
        return ArmStats(
            description=arm.drafter.describe(),
            num_drafts=arm.num_drafts,
            tau=arm.tau,
            step_ms=step_ms,
            tokens_per_ms=arm.tau / step_ms,
            error=None if arm.tau_error is None else arm.tau_error / step_ms,
        )

    def _step_ms(self, arm: _Arm) -> float:
        """A step if all its requests were of this drafter; 1 without a table: then tokens alone count."""
        if self._table is None or not arm.num_drafts or not self._num_steps:
            return 1.0
        requests = self._num_drafting / self._num_steps
        verify = self._table.verify_cost_ms(max(1, round(requests * (1 + arm.verified / arm.num_drafts))))
        # Measured per drafting, not per request: it is not twice as dear for twice as many.
        scale = arm.draft_ms / arm.table_draft_ms if arm.table_draft_ms else 1.0
        commit_ms = self._arms[0].commit_ms if self._shares_context else arm.commit_ms
        return verify + scale * self._table.draft_cost_ms(requests) + commit_ms / self._num_steps

    def _timed_block(self, arm: _Arm, requests: Sequence[DraftRequest], width: int) -> DraftBlock:
        started_ms = self._clock.now_ms()
        block = arm.drafter.propose(requests)
        arm.draft_ms += self._clock.now_ms() - started_ms
        arm.num_calls += 1
        if self._table is not None:
            arm.table_draft_ms += self._table.draft_cost_ms(len(requests) * width / self.num_draft_tokens)
        return block

    def _probs(self, drafter: Drafter, probs: Tensor | None) -> Tensor | None:
        """[len, Vd] over the target's vocabulary where the two drafters have different ones."""
        if probs is None or drafter.vocab_map is None or not self._expands:
            return probs
        whole = torch.zeros((len(probs), self._vocab_size), dtype=probs.dtype, device=probs.device)
        whole[:, drafter.vocab_map] = probs
        return whole


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)
