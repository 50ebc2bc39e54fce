"""How long requests waited for their tokens, counted so that percentiles of a whole fleet can be had."""

from dataclasses import dataclass

TTFT_BOUNDS_MS = (10, 25, 50, 100, 200, 300, 500, 750, 1000, 1500, 2000, 3000, 5000, 10_000, 30_000, 60_000)
TPOT_BOUNDS_MS = (1, 2, 3, 5, 7, 10, 15, 20, 25, 30, 40, 50, 60, 75, 100, 150, 200, 300, 500, 1000)


@dataclass(frozen=True, slots=True)
class TimeCounts:
    """A histogram that only grows."""

    bounds_ms: tuple[float, ...]
    counts: tuple[int, ...]  # [len(bounds_ms) + 1]; the last: above all bounds
    sum_ms: float = 0.0

    @property
    def cumulative(self) -> tuple[tuple[str, int], ...]:
        """(bound as Prometheus' label `le` has it, how many were at most that), by bound."""
        totals, total = [], 0
        for bound, count in zip((*map(str, self.bounds_ms), "+Inf"), self.counts, strict=True):
            total += count
            totals.append((bound, total))
        return tuple(totals)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Of one engine's requests since its start; those resumed from another replica are left out."""

    first_token: TimeCounts = TimeCounts(TTFT_BOUNDS_MS, (0,) * (len(TTFT_BOUNDS_MS) + 1))
    per_token: TimeCounts = TimeCounts(TPOT_BOUNDS_MS, (0,) * (len(TPOT_BOUNDS_MS) + 1))
    good_tokens: int = 0  # of requests that kept to both limits of `observability.goodput`
