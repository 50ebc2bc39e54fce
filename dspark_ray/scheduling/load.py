"""What one more request costs a replica: its throughput by number of requests, at its present survival.

Each replica works its curve out from its own table and live scores; router and autoscaler, which run
elsewhere, read it without either.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark_ray.core.types import EngineStats
from dspark_ray.scheduling.correction import OnlineCorrection
from dspark_ray.scheduling.step_table import StepTable, cost_curve
from dspark_ray.scheduling.survival import Floats, clean_survival

Rates = tuple[tuple[int, float], ...]
"""(requests decoding, tokens per second of all of them together), ascending; empty: nothing is known."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One replica as router and autoscaler see it."""

    num_running: int
    num_waiting: int
    max_running: int
    free_tokens: int  # that its KV cache has room for
    rates: Rates
    prefill_ms_per_token: float

    @classmethod
    def of(cls, stats: EngineStats) -> "ReplicaLoad":
        free_blocks = stats.kv_total_blocks - stats.kv_used_blocks
        return cls(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            max_running=stats.max_running,
            free_tokens=free_blocks * stats.kv_block_size,
            rates=stats.rates,
            prefill_ms_per_token=stats.prefill_ms_per_token,
        )

    def tokens_per_s(self, num_requests: float) -> float:
        """Throughput with so many requests decoding, linear between the points of the curve."""
        counts = [0, *(count for count, _ in self.rates)]
        return float(np.interp(num_requests, counts, [0.0, *(rate for _, rate in self.rates)]))


def request_counts(max_running: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `max_running`: where curves are worked out."""
    return (*(1 << k for k in range((max_running - 1).bit_length())), max_running)


def throughput_curve(
    mean_survival: Floats,
    table: StepTable,
    correction: OnlineCorrection | None,
    counts: Sequence[int],
    context_tokens_per_request: float = 0.0,
) -> Rates:
    """The best throughput with each number of requests, speculating or not. mean_survival [γ], live"""
    mean = clean_survival(np.asarray(mean_survival)[None, :])[0]
    rates = []
    for count in counts:
        tokens = count + np.concatenate(([0.0], np.cumsum(np.repeat(mean, count))))  # [count·γ + 1]
        cost_ms = cost_curve(
            table,
            correction,
            base_rows=count,
            max_draft_tokens=len(tokens) - 1,
            num_drafting=0,
            context_tokens=count * context_tokens_per_request,
        )
        speculating = tokens / (cost_ms + table.draft_cost_ms(count))
        rates.append((int(count), 1e3 * max(float(speculating.max()), count / float(cost_ms[0]))))
    return tuple(rates)


def capacity_at(rates: Rates, tokens_per_s_per_request: float) -> float:
    """The most tokens per second at which each request still has that speed; 0 if none ever has.

    Speeds fall with the number of requests: the last number that has it is looked for between the points.
    """
    best = 0.0
    for (low, low_rate), (high, high_rate) in zip(((0, 0.0), *rates), rates, strict=False):
        if high_rate >= tokens_per_s_per_request * high:
            best = high_rate
            continue
        slope = (high_rate - low_rate) / (high - low)
        if low and tokens_per_s_per_request > slope and low_rate >= tokens_per_s_per_request * low:
            count = (low_rate - slope * low) / (tokens_per_s_per_request - slope)
            best = tokens_per_s_per_request * count
        break
    return best
