"""What a step costs now: the step table under live corrections, laid out so that its costs are a slice."""

import numpy as np
from numpy.typing import NDArray

from dspark_ray.scheduling.correction import OnlineCorrection
from dspark_ray.scheduling.step_table import StepTable

_REFRESH_STEPS = 8  # a correction moves by a tenth of what is new in a step


class LiveCosts:
    """Predicted step times for up to `max_rows` rows, corrected by what steps and drafting really took.

    Steps with draft tokens have a correction of their own: they have more to do for a row, and whether to
    speculate at all is the comparison of the two.
    """

    def __init__(self, table: StepTable, max_rows: int, num_draft_tokens: int) -> None:
        self.table = table
        self.plain, self._speculating = OnlineCorrection(), OnlineCorrection()  # of target steps, by rows
        self._draft = OnlineCorrection()  # of drafting, by drafted tokens
        self._num_draft_tokens = num_draft_tokens
        self._rows = np.arange(max_rows + 1, dtype=np.int64)
        self._table_ms = table.verify_cost_ms(self._rows)
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
        base = max(1, min(decode_rows + prefill_rows, rows))
        alone = base if whole_step else max(1, min(decode_rows, rows))
        cost_ms = self._speculating_ms[base : base + max_draft_tokens + 1]
        cost_ms = cost_ms - (self._speculating_ms[base] - self._speculating_ms[alone])
        cost_ms[0] = self._plain_ms[alone]
        context_ms = self.table.context_ms_per_token * context_tokens * float(self._plain_factor[alone])
        return np.asarray(np.maximum.accumulate(cost_ms) + (context_ms + draft_ms), dtype=np.float64)

    def step_ms(self, rows: int, num_draft_tokens: int, context_tokens: int) -> float:
        """Time of a target step of `rows` rows, `num_draft_tokens` of them drafted."""
        factors = self._speculating_factor if num_draft_tokens else self._plain_factor
        return self._uncorrected_ms(rows, context_tokens) * float(factors[min(rows, len(factors) - 1)])

    def draft_ms(self, num_requests: int, num_tokens: int) -> float:
        """Time to draft `num_tokens` for each of `num_requests`."""
        size = (num_requests, num_tokens)
        if size not in self._draft_ms:
            factor = float(self._draft.factor(np.array([num_requests * num_tokens]))[0])
            self._draft_ms[size] = self._table_draft_ms(*size) * factor
        return self._draft_ms[size]

    def note_step(self, rows: int, num_draft_tokens: int, context_tokens: int, measured_ms: float) -> None:
        """A target step, and what it took without drafting."""
        correction = self._speculating if num_draft_tokens else self.plain
        correction.update(rows, self._uncorrected_ms(rows, context_tokens), max(measured_ms, 0.0))
        self._notes += 1
        if self._notes % _REFRESH_STEPS == 0:
            self._refresh()

    def note_draft(self, num_requests: int, num_tokens: int, measured_ms: float) -> None:
        """Drafting, and what it took."""
        table_ms = self._table_draft_ms(num_requests, num_tokens)
        self._draft.update(num_requests * num_tokens, table_ms, measured_ms)

    def _uncorrected_ms(self, rows: int, context_tokens: int) -> float:
        if rows >= len(self._table_ms):
            return self.table.verify_cost_ms(rows, context_tokens)
        return float(self._table_ms[rows]) + self.table.context_ms_per_token * context_tokens

    def _table_draft_ms(self, num_requests: int, num_tokens: int) -> float:
        return self.table.draft_cost_ms(num_requests, num_tokens / self._num_draft_tokens)

    def _refresh(self) -> None:
        self._draft_ms: dict[tuple[int, int], float] = {}  # until the next refresh
        self._plain_factor = self.plain.factor(self._rows)
        self._speculating_factor = self._speculating.factor(self._rows)
        self._plain_ms = np.maximum.accumulate(self._table_ms * self._plain_factor)
        self._speculating_ms = np.maximum.accumulate(self._table_ms * self._speculating_factor)
