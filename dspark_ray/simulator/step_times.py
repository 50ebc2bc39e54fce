"""What steps take in a simulation, which need not be what policies think that they take.

Policies go by their step table and correct it by the steps that they see, here as in the engine. A table
alone makes both the same; a record of a run (`calibrate.py`) tells them apart.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dspark_ray.scheduling.live_costs import StepSize
from dspark_ray.scheduling.step_table import StepTable

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A machine's steps."""

    table: StepTable  # of plain steps, of what prompts add to any, and of drafting
    speculating: StepTable | None = None  # its `verify_ms`: of steps with draft tokens; None: as plain ones
    # From a step's end to the next one's beginning, which no step's measured time holds: without decoding
    # requests, and more for each.
    between_ms: float = 0.0
    between_ms_per_request: float = 0.0
    # [K] of successive steps, measured over expected time, 1 in the mean: steps go through it from some place
    # on, so that what lasts for a while in the machine lasts here. Empty: steps of a size are alike.
    scatter: Floats = field(default_factory=lambda: np.zeros(0))

    def step_ms(self, step: StepSize) -> float:
        """Of a target step, in the mean."""
        context = (step.context_tokens, step.num_requests)
        if step.draft_rows == 0 or self.speculating is None:
            return self.table.step_cost_ms(step.decode_rows, step.prompt_rows, *context)
        decode_ms = self.speculating.verify_cost_ms(step.decode_rows, *context)
        return decode_ms + self.table.added_prompt_ms(step.decode_rows, step.prompt_rows)

    def pause_ms(self, num_decoding: int) -> float:
        """After a step with so many decoding requests."""
        return self.between_ms + self.between_ms_per_request * num_decoding

    def draft_ms(self, num_requests: int, share: float) -> float:
        """Of drafting this share of a block for each of `num_requests`, in the mean."""
        return self.table.draft_cost_ms(num_requests, share)


class Disturbances:
    """One replica's way through a scatter."""

    def __init__(self, scatter: Floats, rng: np.random.Generator) -> None:
        self._scatter = scatter
        self._place = int(rng.integers(len(scatter))) if len(scatter) else 0

    def next(self) -> float:
        """What the coming step's time is to be multiplied by."""
        if not len(self._scatter):
            return 1.0
        self._place = (self._place + 1) % len(self._scatter)
        return float(self._scatter[self._place])
