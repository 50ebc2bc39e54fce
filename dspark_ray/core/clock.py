"""Time as a value that tests can set. Monotonic, in milliseconds."""

import time
from typing import Protocol


class Clock(Protocol):
    """Anything with `now_ms()`; never goes backwards."""

    def now_ms(self) -> float: ...


class SystemClock:
    """The process's monotonic clock (comparable between processes of one machine only)."""

    def now_ms(self) -> float:
        return time.monotonic() * 1e3


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_ms: float = 0.0) -> None:
        self._now_ms = start_ms

    def now_ms(self) -> float:
        return self._now_ms

    def advance(self, by_ms: float) -> None:
        assert by_ms >= 0, "time does not go backwards"
        self._now_ms += by_ms
