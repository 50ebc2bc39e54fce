"""What a step costs now: the step table under live corrections, laid out so that its costs are a slice."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_ray.scheduling.correction import OnlineCorrection
from dspark_ray.scheduling.step_table import StepTable

_REFRESH_STEPS = 8  # a correction moves by a tenth of what is new in a step


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a target step holds."""

    decode_rows: int  # anchors and draft tokens
    draft_rows: int = 0  # of these, draft tokens
    prompt_rows: int = 0
    context_tokens: int = 0  # cached keys that the decoding requests attend to

    @property
    def num_requests(self) -> int:
        """That decode; 1 at least, to divide by."""
        return max(1, self.decode_rows - self.draft_rows)


class LiveCosts:
    """Predicted step times for up to `max_rows` rows, corrected by what steps and drafting really took.

    Steps with draft tokens have a correction of their own: they have more to do for a row, and whether to
    speculate at all is the comparison of the two. So have the rows of prompts; of a step with prompts, the
    larger part is corrected, and the other one taken as it is known.
    """

    def __init__(self, table: StepTable, max_rows: int, num_draft_tokens: int) -> None:
        self.table = table
        self.plain, self._speculating = OnlineCorrection(), OnlineCorrection()  # of target steps, by rows
        self._prompt = OnlineCorrection()  # of what prompts add to a step, by their rows
        self._draft = OnlineCorrection()  # of drafting, by drafted tokens
        self._num_draft_tokens = num_draft_tokens
        self._rows = np.arange(max_rows + 1, dtype=np.int64)
        self._table_ms = table.verify_cost_ms(self._rows)
        self._prompt_ms = table.prompt_cost_ms(self._rows)
        self._notes = 0
        self._refresh()

    def curve(
        self,
        decode_rows: int,
        prefill_rows: int,
        max_draft_tokens: int,
        context_tokens: int,
        *,
        draft_ms: float = 0.0,
        whole_step: bool = False,
    ) -> NDArray[np.float64]:
        """Time of a step with B = 0, 1, ... draft tokens, `draft_ms` added. → [≤ max_draft_tokens + 1]

        Shorter where rows run out, non-decreasing. Unless the `whole_step` is asked for, prefill only counts
        by what it makes of a draft token's price: its own time is spent either way, and tokens that seem
        cheap beside a long prefill cost what they cost.
        """
        rows = len(self._rows) - 1
        alone = max(1, min(decode_rows, rows))
        beside = max(0, min(prefill_rows, rows - alone))
        most = max(0, min(max_draft_tokens, rows - alone - beside))
        cost_ms = self._speculating_ms[alone : alone + most + 1].copy()
        cost_ms[0] = self._plain_ms[alone]
        if beside:
            with_prompts = self._prompt_ms[alone + beside : alone + beside + most + 1]
            added_ms = with_prompts - self._prompt_ms[alone : alone + most + 1]
            added_ms = added_ms * float(self._prompt_factor[beside])
            cost_ms += added_ms if whole_step else added_ms - added_ms[0]
        context_ms = self.table.context_cost_ms(context_tokens, np.arange(most + 1) / alone)
        context_ms = context_ms * float(self._plain_factor[alone])
        return np.asarray(np.maximum.accumulate(cost_ms) + (context_ms + draft_ms), dtype=np.float64)

    def step_ms(self, step: StepSize) -> float:
        """Time of a target step."""
        return sum(self._known_ms(step, *self._uncorrected_ms(step)))

    def draft_ms(self, num_requests: int, num_tokens: int) -> float:
        """Time to draft `num_tokens` for each of `num_requests`."""
        return self.draft_ms_by_width(num_requests)[num_tokens]

    def draft_ms_by_width(self, num_requests: int) -> list[float]:
        """The same for 0, 1, ... γ tokens of each. → [γ + 1]"""
        if num_requests not in self._draft_ms:
            widths = range(self._num_draft_tokens + 1)
            factors = self._draft.factor(np.maximum(num_requests * np.array(widths), 1)).tolist()
            table_ms = [self._table_draft_ms(num_requests, width) for width in widths]
            self._draft_ms[num_requests] = [ms * f for ms, f in zip(table_ms, factors, strict=True)]
        return self._draft_ms[num_requests]

    def note_step(self, step: StepSize, measured_ms: float) -> None:
        """A target step, and what it took without drafting."""
        decode_ms, prompt_ms = self._uncorrected_ms(step)
        known_decode_ms, known_prompt_ms = self._known_ms(step, decode_ms, prompt_ms)
        if known_prompt_ms > known_decode_ms:
            self._prompt.update(step.prompt_rows, prompt_ms, measured_ms - known_decode_ms)
        else:
            correction = self._speculating if step.draft_rows else self.plain
            correction.update(step.decode_rows, decode_ms, measured_ms - known_prompt_ms)
        self._notes += 1
        if self._notes % _REFRESH_STEPS == 0:
            self._refresh()

    def note_draft(self, num_requests: int, num_tokens: int, measured_ms: float) -> None:
        """Drafting, and what it took."""
        table_ms = self._table_draft_ms(num_requests, num_tokens)
        self._draft.update(num_requests * num_tokens, table_ms, measured_ms)

    def _uncorrected_ms(self, step: StepSize) -> tuple[float, float]:
        """What the table says of the rows that decode, and of the prompts beside them."""
        rows, decode_ms = step.decode_rows, 0.0
        if rows > 0:
            inside = rows < len(self._table_ms)
            decode_ms = float(self._table_ms[rows]) if inside else self.table.verify_cost_ms(rows)
            decode_ms += self.table.context_cost_ms(step.context_tokens, step.draft_rows / step.num_requests)
        return decode_ms, self.table.added_prompt_ms(rows, step.prompt_rows)

    def _known_ms(self, step: StepSize, decode_ms: float, prompt_ms: float) -> tuple[float, float]:
        """Both, corrected."""
        most = len(self._rows) - 1
        factors = self._speculating_factor if step.draft_rows else self._plain_factor
        decode_ms *= float(factors[min(step.decode_rows, most)])
        return decode_ms, prompt_ms * float(self._prompt_factor[min(step.prompt_rows, most)])

    def _table_draft_ms(self, num_requests: int, num_tokens: int) -> float:
        return self.table.draft_cost_ms(num_requests, num_tokens / self._num_draft_tokens)

    def _refresh(self) -> None:
        self._draft_ms: dict[int, list[float]] = {}  # until the next refresh
        self._plain_factor = self.plain.factor(self._rows)
        known = self._speculating if self._speculating.is_known else self.plain
        self._speculating_factor = known.factor(self._rows)
        self._prompt_factor = self._prompt.factor(self._rows)
        self._plain_ms = np.maximum.accumulate(self._table_ms * self._plain_factor)
        self._speculating_ms = np.maximum.accumulate(self._table_ms * self._speculating_factor)
