"""Passes whose sums wait on the device: the host goes on, so somebody else must notice that they do not end.

watch = DeviceWatch(timeout_s=60.0, reason=lambda: "rank 2 is behind in message 7")
watch.note(event)  # behind every pass; one that is not done in time is logged with the reason, and the end

Nothing gentler is sure: ending the communicator lets the device run on with sums that never came.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from dspark_ray.core.clock import Clock, SystemClock

logger = logging.getLogger(__name__)

_LOOK_S = 0.25


class Done(Protocol):
    """Recorded in the device's stream, as a CUDA event."""

    def query(self) -> bool:
        """Whether the device has come to it. Does not wait."""
        ...


def end_process(reason: str) -> None:
    """Its server sees that at once, and replaces the replica."""
    logger.critical("%s; this process ends", reason)
    logging.shutdown()
    os._exit(1)


class DeviceWatch:
    """`note` is the step loop's; `close` ends the thread that looks."""

    def __init__(
        self,
        timeout_s: float,
        reason: Callable[[], str],
        end: Callable[[str], None] = end_process,
        clock: Clock | None = None,
    ) -> None:
        self._timeout_s, self._reason, self._end = timeout_s, reason, end
        self._clock = clock or SystemClock()
        self._waiting: deque[tuple[Done, float]] = deque()  # with when it was noted, in ms; oldest first
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dspark-device-watch", daemon=True)
        self._thread.start()

    def note(self, done: Done) -> None:
        """The device should come to this within the longest wait."""
        self._waiting.append((done, self._clock.now_ms()))

    def look(self) -> bool:
        """Forgets what is done; False where something has taken too long, which ends the process."""
        while self._waiting:
            done, noted_ms = self._waiting[0]
            if not done.query():
                waited_s = (self._clock.now_ms() - noted_ms) / 1e3
                if waited_s <= self._timeout_s:
                    return True
                self._end(f"a pass has waited {waited_s:.0f} s on the device: {self._reason()}")
                return False
            self._waiting.popleft()
        return True

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_S):
            if not self.look():
                return
