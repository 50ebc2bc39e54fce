"""A step table as a record says it is: what the engine's own online correction learns, applied once."""

from collections.abc import Iterable

from dspark_ray.core.step_record import RecordedStep
from dspark_ray.scheduling.correction import OnlineCorrection
from dspark_ray.scheduling.step_table import StepTable


def corrected_table(table: StepTable, steps: Iterable[RecordedStep], num_draft_tokens: int) -> StepTable:
    """`table` with its step times scaled, by size of step, to those of a recorded run on it.

    Drafting is taken as the table has it, for as many tokens as each request's draft had.
    """
    correction = OnlineCorrection()
    width = float(num_draft_tokens)
    for step in steps:
        if step.drafts:
            width = max(len(draft.survival) for draft in step.drafts)
        draft_ms = table.draft_cost_ms(step.num_drafted, width / num_draft_tokens)
        predicted_ms = table.verify_cost_ms(step.rows, step.context_tokens)
        correction.update(step.rows, predicted_ms, max(step.measured_ms - draft_ms, 0.0))
    return StepTable(
        rows=table.rows,
        verify_ms=table.verify_ms * correction.factor(table.rows),
        staircase_rows=table.staircase_rows,
        requests=table.requests,
        draft_ms=table.draft_ms,
        draft_fixed_ms=table.draft_fixed_ms,
        context_ms_per_token=table.context_ms_per_token,
        made_from={**table.made_from, "corrected": True},
    )
