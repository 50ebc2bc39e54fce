"""Plans for a fleet too large to be planned anew at every report: sent to all, a few times a second."""

import logging
import threading
from collections.abc import Callable

import zmq

from dspark_ray.core.clock import Clock
from dspark_ray.core.types import StepPlan
from dspark_ray.runtime.messages import ApplyPlan
from dspark_ray.runtime.transport import Outboxes

logger = logging.getLogger(__name__)

PERIOD_MS = 200.0
MAX_REPLICAS = 20_000
REST = 1.0  # a round that took t ms is followed by no other for REST·t

DuePlans = Callable[[], list[tuple[str, StepPlan]]]
"""(address of an engine's inbox, its plan) of all who are to get one now; called on the pusher's thread."""


class PlanPush:
    """A thread of the scheduler's process. A replica that takes nothing delays no other."""

    def __init__(self, due: DuePlans, context: zmq.Context, clock: Clock) -> None:
        """`context` without sockets: how many it may have is set here."""
        context.set(zmq.MAX_SOCKETS, MAX_REPLICAS)  # zmq's own limit is 1023
        self._due = due
        self._outboxes = Outboxes(context, clock)
        self._clock = clock
        self.num_rounds, self.rounds_ms = 0, 0.0  # that had plans to send, and how long they took together
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dspark-push", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._outboxes.close()

    def push(self) -> float:
        """One round; how long until the next one may begin, in ms."""
        started_ms = self._clock.now_ms()
        plans = self._due()
        for address, plan in plans:
            self._outboxes.send(address, ApplyPlan(plan))
        self._outboxes.flush()
        self._outboxes.drop_dead()
        took_ms = self._clock.now_ms() - started_ms
        if plans:
            self.num_rounds += 1
            self.rounds_ms += took_ms
        return max(PERIOD_MS - took_ms, REST * took_ms)

    def _run(self) -> None:
        wait_ms = PERIOD_MS
        while not self._closed.wait(wait_ms / 1e3):
            try:
                wait_ms = self.push()
            except Exception:  # of whatever kind: replicas plan alone meanwhile, the next round may succeed
                logger.exception("a round of plans was lost")
                wait_ms = PERIOD_MS
