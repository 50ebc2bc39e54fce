"""Fair turns between flows (clients) that share a queue: start-time fair queueing.

Each request gets a tag, the virtual time at which its flow's turn comes: the end of the flow's previous
request, or now if the flow had none waiting. A request takes its cost in virtual time. Requests run in the
order of their tags, and the clock is the largest that has begun (levels of priority shift tags: it is the
shifted one, so that no level sets the clock ahead for the others). So flows that all have something waiting
get equal costs through, whatever they have queued; a flow that was quiet saves nothing up; nobody starves:
later requests of a flow have later tags, and a new flow begins at the clock. With one flow it is first come,
first served.
"""

from collections.abc import Hashable

_KEPT_FLOWS = 1024


class FairShare:
    """Virtual time, and where in it each flow is."""

    def __init__(self) -> None:
        self._now = 0.0
        self._end: dict[Hashable, float] = {}  # of the last request of each flow

    def tag(self, flow: Hashable) -> float:
        """Of the flow's next request, if it is taken."""
        return max(self._now, self._end.get(flow, 0.0))

    def take(self, flow: Hashable, cost: float) -> float:
        """Queues a request of that cost (> 0); its tag."""
        tag = self.tag(flow)
        self._end[flow] = tag + cost
        return tag

    def give_back(self, flow: Hashable, cost: float) -> None:
        """A queued request will not run: the flow's next one need not wait for it."""
        if flow in self._end:
            self._end[flow] -= cost

    def begin(self, tag: float) -> None:
        """The request with this tag, shifted by its level, leaves the queue to run."""
        self._now = max(self._now, tag)
        if len(self._end) > _KEPT_FLOWS:  # those behind the clock have nothing to remember
            self._end = {flow: end for flow, end in self._end.items() if end > self._now}
