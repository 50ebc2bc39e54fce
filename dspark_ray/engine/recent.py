"""The steps of the last second, for metrics and for the scheduler actor."""

from collections import deque
from dataclasses import dataclass

from dspark_ray.core.clock import Clock

_WINDOW_MS = 1000.0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as it went."""

    ended_ms: float
    measured_ms: float
    predicted_ms: float
    budget_tokens: int  # draft tokens verified
    rows: int
    num_decoding: int


@dataclass(frozen=True, slots=True)
class RecentSummary:
    """Means over the window; zeros when nothing ran."""

    budget_tokens: float = 0.0
    measured_ms: float = 0.0
    predicted_ms: float = 0.0


class RecentSteps:
    """Written by the step loop; `steps()` takes a copy, so another thread may read."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._records: deque[StepRecord] = deque(maxlen=4096)

    def add(self, record: StepRecord) -> None:
        self._records.append(record)
        while self._records and record.ended_ms - self._records[0].ended_ms > _WINDOW_MS:
            self._records.popleft()

    def steps(self) -> list[StepRecord]:
        now = self._clock.now_ms()
        return [r for r in list(self._records) if now - r.ended_ms <= _WINDOW_MS]

    def summary(self) -> RecentSummary:
        steps = self.steps()
        if not steps:
            return RecentSummary()
        count = len(steps)
        return RecentSummary(
            budget_tokens=sum(s.budget_tokens for s in steps) / count,
            measured_ms=sum(s.measured_ms for s in steps) / count,
            predicted_ms=sum(s.predicted_ms for s in steps) / count,
        )
