"""What steps take on a machine, as a record of a run says: its step table's curves, scaled by size."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dspark_ray.core.step_record import RecordedStep
from dspark_ray.core.types import IntArray
from dspark_ray.scheduling.live_costs import StepSize
from dspark_ray.scheduling.step_table import StepTable
from dspark_ray.simulator.step_times import StepTimes

_PRIOR_SHARE = 0.05  # of all measured time: a size that took so much counts half, the mean of all sizes half

Floats = NDArray[np.float64]


def measured_times(
    table: StepTable, runs: Sequence[Iterable[RecordedStep]], num_draft_tokens: int
) -> StepTimes:
    """`table` with its times scaled to those of recorded runs on it; `runs`: a record each.

    Decoding rows by the steps without prompts, those with draft tokens and those without apart; prompts by
    what is left of the steps with them; drafting by its own times (records of before these were kept: as the
    table has it). Unlike the engine's online correction it is a mean over all runs, stalls of the machine
    included: it foretells throughput. How steps scatter about it, in the order in which they did, and what
    the program does between two of them, come with it.
    """
    steps = [[_parted(table, step, num_draft_tokens) for step in run] for run in runs]
    parts = [part for run in steps for part in run]
    decoding, prompts, drafting = _Ratios(), _Ratios(), _Ratios()
    speculating = _Ratios(decoding)
    for part in parts:
        if part.step.draft_ms > 0:
            drafting.add(part.drafted_tokens, part.expected_draft_ms, part.step.draft_ms)
        if not part.size.prompt_rows:
            mine = speculating if part.size.draft_rows else decoding
            rows = part.size.decode_rows
            expected_ms = table.verify_cost_ms(rows, part.size.context_tokens, part.size.num_requests)
            mine.add(rows, expected_ms, part.target_ms)
    if not decoding.known:  # a run that always speculates says the most that there is to know
        decoding = speculating
    plain = replace(table, verify_ms=table.verify_ms * decoding.at(table.rows))
    speculated = replace(table, verify_ms=table.verify_ms * speculating.at(table.rows))
    for part in parts:
        size = part.size
        if size.prompt_rows:
            alone, rows = speculated if size.draft_rows else plain, size.decode_rows
            alone_ms = 0.0
            if rows:
                alone_ms = alone.verify_cost_ms(rows, size.context_tokens, size.num_requests)
            expected_ms = table.added_prompt_ms(rows, size.prompt_rows)
            prompts.add(size.prompt_rows, expected_ms, part.target_ms - alone_ms)
    # Without a curve of their own, prompts cost what decoding rows do: they get one.
    prompt_rows_of = table.prompt_rows if len(table.prompt_rows) else table.rows
    drafts = drafting.at(table.requests * num_draft_tokens)
    plain = replace(
        plain,
        prompt_rows=prompt_rows_of,
        prompt_ms=table.prompt_cost_ms(prompt_rows_of) * prompts.at(prompt_rows_of),
        draft_ms=table.draft_ms * drafts,
        draft_fixed_ms=table.draft_fixed_ms * drafts if len(table.draft_fixed_ms) else table.draft_fixed_ms,
        made_from={**table.made_from, "corrected": True},
    )
    pause, pause_per_request = _pauses([[part.step for part in run] for run in steps])
    times = StepTimes(plain, speculated, pause, pause_per_request)
    return replace(times, scatter=_scatter(times, parts, num_draft_tokens))


@dataclass(frozen=True, slots=True)
class _Part:
    """A recorded step, taken apart."""

    step: RecordedStep
    size: StepSize
    drafted_tokens: int
    share: float  # of a block that was drafted
    expected_draft_ms: float
    target_ms: float


def _parted(table: StepTable, step: RecordedStep, num_draft_tokens: int) -> _Part:
    width = step.draft_tokens or max((len(draft.survival) for draft in step.drafts), default=0)
    share = (width or num_draft_tokens) / num_draft_tokens
    expected_ms = table.draft_cost_ms(step.num_drafted, share)
    decode_rows = step.num_decoding + step.verified_tokens
    size = StepSize(decode_rows, step.verified_tokens, step.rows - decode_rows, step.context_tokens)
    target_ms = step.measured_ms - (step.draft_ms or expected_ms)
    return _Part(step, size, step.num_drafted * width, share, expected_ms, target_ms)


def _pauses(runs: Sequence[Sequence[RecordedStep]]) -> tuple[float, float]:
    """Time from one step's end to the next one's beginning, where the engine had something to do: without
    decoding requests, and for each; a line of best fit."""
    counts, gaps = [], []
    for steps in runs:
        arrived = np.sort([request.arrived_ms for step in steps for request in step.ended])
        ended = np.sort([request.ended_ms for step in steps for request in step.ended])
        for before, after in pairwise(steps):
            there = np.searchsorted(arrived, before.ended_ms) - np.searchsorted(
                ended, before.ended_ms, "right"
            )
            gap_ms = after.ended_ms - after.measured_ms - before.ended_ms - after.recording_ms
            if there > 0 and gap_ms > 0:
                counts.append(before.num_decoding)
                gaps.append(gap_ms)
    if len(set(counts)) < 2:
        return float(np.mean(gaps)) if gaps else 0.0, 0.0
    slope, start = np.polyfit(counts, gaps, 1)
    if slope < 0 or start < 0:  # it has no reason to fall: then noise is more than what there is to see
        return float(np.mean(gaps)), 0.0
    return float(start), float(slope)


def _scatter(times: StepTimes, parts: Sequence[_Part], num_draft_tokens: int) -> Floats:
    """Measured over expected time of each step, 1 in the mean."""
    expected = [
        times.step_ms(part.size) + times.draft_ms(part.step.num_drafted, part.share) for part in parts
    ]
    ratios = np.array([part.step.measured_ms for part in parts]) / np.array(expected)
    return ratios / ratios.mean() if len(ratios) else ratios


class _Ratios:
    """Measured over predicted time by power-of-two size, shrunk to the ratio over all sizes."""

    def __init__(self, prior: "_Ratios | None" = None) -> None:
        """prior: what a size is shrunk to instead, where that is known and this is not."""
        self._sums: dict[int, list[float]] = {}  # log2 of the size → predicted, measured
        self._prior = prior

    @property
    def known(self) -> bool:
        return bool(self._sums)

    def add(self, size: int, predicted_ms: float, measured_ms: float) -> None:
        if size >= 1 and predicted_ms > 0:
            sums = self._sums.setdefault((size - 1).bit_length(), [0.0, 0.0])
            sums[0] += predicted_ms
            sums[1] += measured_ms

    def at(self, sizes: IntArray) -> Floats:
        """A factor for each size, linear in its logarithm; 1 while nothing is known. [n] → [n]"""
        predicted = sum(sums[0] for sums in self._sums.values())
        measured = sum(sums[1] for sums in self._sums.values())
        if measured <= 0:
            return np.ones(len(sizes)) if self._prior is None else self._prior.at(sizes)
        prior = _PRIOR_SHARE * predicted
        mean = measured / predicted
        known = sorted(self._sums.items())
        factors = [(own[1] + prior * mean) / (own[0] + prior) for _, own in known]
        middles = [max(bucket - 0.5, 0.0) for bucket, _ in known]
        places = np.log2(np.maximum(np.asarray(sizes, dtype=np.float64), 1.0))
        return np.asarray(np.interp(places, middles, np.maximum(factors, 1e-3)), dtype=np.float64)
