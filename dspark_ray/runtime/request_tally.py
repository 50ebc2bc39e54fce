"""Times of the requests of one engine: from their arrival at its loop, the queue included, without HTTP."""

import bisect
from dataclasses import dataclass

from dspark_ray.core.config import GoodputConfig
from dspark_ray.core.request_times import TPOT_BOUNDS_MS, TTFT_BOUNDS_MS, RequestTimes, TimeCounts
from dspark_ray.core.types import FinishReason, Request, RequestOutput


@dataclass(slots=True)
class Stopwatch:
    """One request's."""

    arrived_ms: float
    first_ms: float | None = None
    num_first: int = 0  # tokens that came with the first one
    num_tokens: int = 0


class _Counts:
    def __init__(self, bounds_ms: tuple[float, ...]) -> None:
        self._bounds_ms = bounds_ms
        self._counts = [0] * (len(bounds_ms) + 1)
        self._sum_ms = 0.0

    def add(self, value_ms: float) -> None:
        self._counts[bisect.bisect_left(self._bounds_ms, value_ms)] += 1
        self._sum_ms += value_ms

    def freeze(self) -> TimeCounts:
        return TimeCounts(self._bounds_ms, tuple(self._counts), self._sum_ms)


class RequestTally:
    """Belongs to the loop's thread; `times()` is for it, too."""

    def __init__(self, limits: GoodputConfig) -> None:
        self._limits = limits
        self._first_token, self._per_token = _Counts(TTFT_BOUNDS_MS), _Counts(TPOT_BOUNDS_MS)
        self._good_tokens = 0

    def start(self, request: Request, now_ms: float) -> Stopwatch | None:
        """None for what is not a client's whole request: a resumed one, or a trial of the server's own."""
        return None if request.emitted_token_ids or not request.reply_address else Stopwatch(now_ms)

    def note(self, watch: Stopwatch | None, output: RequestOutput, now_ms: float) -> None:
        """An output of the request leaves."""
        if watch is None:
            return
        if watch.first_ms is None and output.token_ids:
            watch.first_ms, watch.num_first = now_ms, len(output.token_ids)
            self._first_token.add(now_ms - watch.arrived_ms)
        watch.num_tokens += len(output.token_ids)
        if output.finish_reason is None or watch.first_ms is None:
            return
        if output.finish_reason is not FinishReason.ERROR:  # an abort may be a stop string that was found
            self._end(watch, watch.first_ms, now_ms)

    def _end(self, watch: Stopwatch, first_ms: float, now_ms: float) -> None:
        following = watch.num_tokens - watch.num_first
        per_token_ms = (now_ms - first_ms) / following if following else 0.0
        if following:
            self._per_token.add(per_token_ms)
        limits = self._limits
        if first_ms - watch.arrived_ms <= limits.ttft_ms and per_token_ms <= limits.tpot_ms:
            self._good_tokens += watch.num_tokens

    def times(self) -> RequestTimes:
        """What has been counted so far."""
        return RequestTimes(self._first_token.freeze(), self._per_token.freeze(), self._good_tokens)
