"""The requests that wait, in order of their turn; bounded, and fair to those who share it.

Who is refused when there is no room: the lowest tier's last in turn, be it the newcomer or one that waits.
Who cannot start in time is refused at once, or taken out when its time has come. A request that has emitted
something, here or elsewhere, is never refused.
"""

import bisect
from collections import Counter, deque
from collections.abc import Iterator

from dspark_ray.core.clock import Clock
from dspark_ray.core.errors import QueueFullError, StartDeadlineError
from dspark_ray.core.types import SERVICE_TIERS
from dspark_ray.engine.sequence import Sequence
from dspark_ray.scheduling.fair_share import FairShare

COST_TOKENS = 256  # requests of up to so many tokens cost 1, longer ones in proportion
MIN_STARTS, KEPT_STARTS = 4, 32  # of which the rate of starts is judged


class WaitingQueue:
    """Iterates in order of turn. Belongs to the step loop's thread."""

    def __init__(self, max_waiting: int, clock: Clock) -> None:
        self.max_waiting = max_waiting
        self._clock = clock
        self._sequences: list[Sequence] = []  # by turn
        self._shares = FairShare()
        self._num_by_tier: Counter[int] = Counter()  # of those that may be shed
        self._num_timed = 0  # that must start by some time
        self._started_ms: deque[float] = deque(maxlen=KEPT_STARTS)  # without a moment of an empty queue
        self._shed: list[tuple[str, QueueFullError]] = []
        self.num_refused = 0  # at the door or later

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def first(self) -> Sequence:
        return self._sequences[0]

    def add(self, sequence: Sequence) -> None:
        """Queues a new request; another one may have to go for it. Raises `QueueFullError`, or
        `StartDeadlineError` where it cannot start in time."""
        request, flow = sequence.request, _flow(sequence)
        tokens = len(request.prompt_token_ids) + sequence.remaining_tokens
        sequence.cost = max(1.0, tokens / COST_TOKENS)
        sequence.tag = self._shares.tag(flow)
        victim = None
        try:
            if _may_be_shed(sequence):  # what has begun is taken beyond the bound: it ran elsewhere before
                if request.start_within_ms is not None:
                    self._check_time(sequence, request.start_within_ms)
                if len(self._sequences) >= self.max_waiting:
                    victim = self._victim_for(sequence)
        except QueueFullError:
            self.num_refused += 1
            raise
        self._shares.take(flow, sequence.cost)
        self._insert(sequence)
        if victim is not None:
            self._refuse(victim, QueueFullError("the queue is full, and others go first; try again later"))

    def put_back(self, sequence: Sequence) -> None:
        """A preempted request, at its old turn."""
        sequence.start_due_ms = None
        self._insert(sequence)

    def start_first(self) -> None:
        """The first one in turn leaves to run."""
        sequence = self._sequences[0]
        self._take_out(sequence)
        self._shares.begin(sequence.turn[0])  # not its tag: a level would set the others' clock ahead
        self._started_ms.append(self._clock.now_ms())
        if not self._sequences:
            self._started_ms.clear()

    def remove(self, sequence: Sequence) -> None:
        """It will not run."""
        self._take_out(sequence)
        if not sequence.num_output:
            self._shares.give_back(_flow(sequence), sequence.cost)

    def expire(self) -> None:
        """Takes out those that should have started by now."""
        if not self._num_timed:
            return
        now_ms = self._clock.now_ms()
        late = [s for s in self._sequences if s.start_due_ms is not None and s.start_due_ms <= now_ms]
        for sequence in late:
            waited_s = (sequence.request.start_within_ms or 0.0) / 1e3
            self._refuse(sequence, StartDeadlineError(f"could not start within {waited_s:.3g} s"))

    def take_shed(self) -> list[tuple[str, QueueFullError]]:
        """Requests taken out since the last call, and what each is to be told."""
        shed, self._shed = self._shed, []
        return shed

    def _check_time(self, sequence: Sequence, start_within_ms: float) -> None:
        """Raises if those before it will take longer, at the rate at which requests start now."""
        sequence.start_due_ms = self._clock.now_ms() + start_within_ms
        if len(self._started_ms) < MIN_STARTS:
            return
        num_before = bisect.bisect(self._sequences, sequence.turn, key=lambda s: s.turn)
        per_start_ms = (self._clock.now_ms() - self._started_ms[0]) / len(self._started_ms)
        if (wait_ms := (num_before + 1) * per_start_ms) > start_within_ms:
            raise StartDeadlineError(
                f"could not start within {start_within_ms / 1e3:.3g} s: {num_before} requests go first, "
                f"which takes about {wait_ms / 1e3:.1f} s"
            )

    def _victim_for(self, newcomer: Sequence) -> Sequence:
        """Who leaves for it. Raises `QueueFullError` if nobody does."""
        lowest = min((tier for tier, count in self._num_by_tier.items() if count), default=None)
        if lowest is not None:
            last = next(s for s in reversed(self._sequences) if _may_be_shed(s) and _tier(s) == lowest)
            if (-_tier(newcomer), newcomer.turn) < (-lowest, last.turn):
                return last
        raise QueueFullError(f"{len(self._sequences)} requests are waiting already; try again later")

    def _refuse(self, sequence: Sequence, error: QueueFullError) -> None:
        self.remove(sequence)
        self._shed.append((sequence.request.request_id, error))
        self.num_refused += 1

    def _insert(self, sequence: Sequence) -> None:
        bisect.insort(self._sequences, sequence, key=lambda s: s.turn)
        self._count(sequence, 1)

    def _take_out(self, sequence: Sequence) -> None:
        place = bisect.bisect_left(self._sequences, sequence.turn, key=lambda s: s.turn)
        assert self._sequences[place] is sequence
        del self._sequences[place]
        self._count(sequence, -1)
        if not self._sequences:  # however the last one left: until somebody waits again, nothing need start
            self._started_ms.clear()

    def _count(self, sequence: Sequence, change: int) -> None:
        if _may_be_shed(sequence):
            self._num_by_tier[_tier(sequence)] += change
        self._num_timed += change * (sequence.start_due_ms is not None)


def _may_be_shed(sequence: Sequence) -> bool:
    """Nobody has seen anything of its answer."""
    return not (sequence.num_output or sequence.request.has_begun)


def _tier(sequence: Sequence) -> int:
    """The lower goes first when there is no room."""
    return SERVICE_TIERS.index(sequence.request.priority.tier)


def _flow(sequence: Sequence) -> tuple[str, int]:
    """Who shares what: a client's requests of one level. Its patient ones do not delay its urgent ones."""
    return sequence.request.client, sequence.request.priority.queue_level
