"""A step table as a record says it is: each of its curves scaled, by size, to what the run's steps took."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dspark_ray.core.step_record import RecordedStep
from dspark_ray.core.types import IntArray
from dspark_ray.scheduling.step_table import StepTable

_PRIOR_SHARE = 0.05  # of all measured time: a size that took so much counts half, the mean of all sizes half

Floats = NDArray[np.float64]


def corrected_table(table: StepTable, steps: Iterable[RecordedStep], num_draft_tokens: int) -> StepTable:
    """`table` with its times scaled to those of a recorded run on it.

    Decoding rows by the steps without prompts, prompts by what is left of the steps with them, drafting by
    its own times (records of before these were kept: as the table has it). Unlike the engine's online
    correction it is a mean over the whole run, stalls of the machine included: it foretells throughput.
    """
    decoding, prompts, drafting = _Ratios(), _Ratios(), _Ratios()
    mixed = []
    for step in steps:
        width = step.draft_tokens or max((len(draft.survival) for draft in step.drafts), default=0)
        expected_ms = table.draft_cost_ms(step.num_drafted, (width or num_draft_tokens) / num_draft_tokens)
        if step.draft_ms > 0:
            drafting.add(step.num_drafted * width, expected_ms, step.draft_ms)
        target_ms = step.measured_ms - (step.draft_ms or expected_ms)
        decode_rows = step.num_decoding + step.verified_tokens
        if step.rows > decode_rows:
            mixed.append((step, decode_rows, target_ms))
        else:
            decoding.add(decode_rows, table.verify_cost_ms(decode_rows, step.context_tokens), target_ms)
    rows = table.rows
    scaled = replace(table, verify_ms=table.verify_ms * decoding.at(rows))
    for step, decode_rows, target_ms in mixed:
        prompt_rows = step.rows - decode_rows
        factor = float(decoding.at(np.array([max(decode_rows, 1)]))[0])
        alone_ms = factor * table.verify_cost_ms(decode_rows, step.context_tokens) if decode_rows else 0.0
        prompts.add(prompt_rows, table.added_prompt_ms(decode_rows, prompt_rows), target_ms - alone_ms)
    # Without a curve of their own, prompts cost what decoding rows do: they get one.
    prompt_rows_of = table.prompt_rows if len(table.prompt_rows) else table.rows
    drafts = drafting.at(table.requests * num_draft_tokens)
    return replace(
        scaled,
        prompt_rows=prompt_rows_of,
        prompt_ms=table.prompt_cost_ms(prompt_rows_of) * prompts.at(prompt_rows_of),
        draft_ms=table.draft_ms * drafts,
        draft_fixed_ms=table.draft_fixed_ms * drafts if len(table.draft_fixed_ms) else table.draft_fixed_ms,
        made_from={**table.made_from, "corrected": True},
    )


class _Ratios:
    """Measured over predicted time by power-of-two size, shrunk to the ratio over all sizes."""

    def __init__(self) -> None:
        self._sums: dict[int, list[float]] = {}  # log2 of the size → predicted, measured

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
            return np.ones(len(sizes))
        prior = _PRIOR_SHARE * predicted
        mean = measured / predicted
        known = sorted(self._sums.items())
        factors = [(own[1] + prior * mean) / (own[0] + prior) for _, own in known]
        middles = [max(bucket - 0.5, 0.0) for bucket, _ in known]
        places = np.log2(np.maximum(np.asarray(sizes, dtype=np.float64), 1.0))
        return np.asarray(np.interp(places, middles, np.maximum(factors, 1e-3)), dtype=np.float64)
