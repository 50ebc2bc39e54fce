"""How many replicas the demand needs: tokens per second over capacity at the speed that requests are owed.

Demand is what is emitted now, plus what waits over the time in which a queue may be worked off. Capacity
is the most tokens per second at which each request still has its speed, from step tables and live acceptance
(`load.capacity_at`). Replicas are added once demand exceeds a share of the capacity, so before
anything queues; they are removed when fewer have been enough for a while.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dspark_ray.core.types import EngineStats
from dspark_ray.scheduling.load import capacity_at

_RISE_S, _FALL_S = 2.0, 15.0  # time constants of the smoothed demand: quick to rise, slow to fall
_DOWN_SHARE = 0.85  # of the utilisation aimed at, that the remaining replicas may have after a removal
UNKNOWN_TOKENS = 128.0  # of a request, before any has ended


@dataclass(frozen=True, slots=True)
class AutoscaleSettings:
    """What an operator decides."""

    min_replicas: int = 1  # 0: none when nobody asks for anything
    max_replicas: int = 1
    target_utilization: float = 0.8
    queue_time_s: float = 1.0  # in which what waits should be worked off
    down_after_s: float = 60.0  # how long fewer must have been enough


@dataclass(frozen=True, slots=True)
class ReplicaDemand:
    """One replica's figures over the last second or so."""

    emitted_tokens_per_s: float
    waiting_tokens: float  # expected of its queued requests
    tokens_per_request: float  # mean so far
    capacity_tokens_per_s: float  # 0: unknown
    num_requests: float  # running and queued


@dataclass(frozen=True, slots=True)
class AutoscaleState:
    """What one decision hands to the next."""

    at_s: float | None = None
    demand_tokens_per_s: float = 0.0  # smoothed
    enough_since_s: float | None = None  # since when fewer replicas would have been enough
    replica_capacity: float = 0.0  # tokens/s, mean of the last replicas that knew theirs
    tokens_per_request: float = UNKNOWN_TOKENS


@dataclass(frozen=True, slots=True)
class AutoscaleDecision:
    """How many replicas there should be, and why."""

    num_replicas: int
    reason: str
    state: AutoscaleState = field(repr=False)


def replica_demand(
    stats: EngineStats, previous: EngineStats | None, elapsed_s: float, target_tokens_per_s: float
) -> ReplicaDemand:
    """From two snapshots of one engine; without an earlier one nothing is known to be emitted."""
    emitted = stats.counters.emitted_tokens
    before = emitted if previous is None else previous.counters.emitted_tokens
    per_request = emitted / stats.num_finished if stats.num_finished else UNKNOWN_TOKENS
    return ReplicaDemand(
        emitted_tokens_per_s=max(0.0, (emitted - before) / elapsed_s) if elapsed_s > 0 else 0.0,
        waiting_tokens=stats.num_waiting * per_request,
        tokens_per_request=per_request,
        capacity_tokens_per_s=capacity_at(stats.rates, target_tokens_per_s),
        num_requests=float(stats.num_running + stats.num_waiting),
    )


def decide(
    replicas: Sequence[ReplicaDemand],
    num_queued: float,
    num_replicas: int,
    settings: AutoscaleSettings,
    state: AutoscaleState,
    now_s: float,
) -> AutoscaleDecision:
    """The number of replicas wanted. num_queued: requests that no replica has taken; num_replicas: as wanted
    last, those that are starting included; `replicas`: those that report.
    """
    state = _observe(replicas, num_queued, settings, state, now_s)
    busy = num_queued + sum(one.num_requests for one in replicas)
    if num_replicas == 0:
        wanted = max(settings.min_replicas, min(1, settings.max_replicas) if busy > 0 else 0)
        return AutoscaleDecision(wanted, f"{busy:g} requests and no replica", state)
    if state.replica_capacity <= 0:
        return AutoscaleDecision(_within(num_replicas, settings), "no replica knows its capacity", state)
    known = [one.capacity_tokens_per_s for one in replicas if one.capacity_tokens_per_s > 0]
    known = known[:num_replicas]
    capacity = sum(known) + (num_replicas - len(known)) * state.replica_capacity
    usable, demand = settings.target_utilization * capacity, state.demand_tokens_per_s
    what = f"demand {demand:.0f} tokens/s, capacity {capacity:.0f}"
    if demand > usable:
        missing = (demand - usable) / (settings.target_utilization * state.replica_capacity)
        wanted = _within(num_replicas + math.ceil(missing), settings)
        return AutoscaleDecision(wanted, what, replace(state, enough_since_s=None))
    fewer = _fewer(demand, busy, num_replicas, known, settings, state)
    if fewer >= num_replicas:
        return AutoscaleDecision(_within(num_replicas, settings), what, replace(state, enough_since_s=None))
    since_s = now_s if state.enough_since_s is None else state.enough_since_s
    if now_s - since_s < settings.down_after_s:
        wait = f"{what}; {fewer} would be enough since {now_s - since_s:.0f} s"
        return AutoscaleDecision(
            _within(num_replicas, settings), wait, replace(state, enough_since_s=since_s)
        )
    return AutoscaleDecision(_within(fewer, settings), what, replace(state, enough_since_s=None))


def _observe(
    replicas: Sequence[ReplicaDemand],
    num_queued: float,
    settings: AutoscaleSettings,
    state: AutoscaleState,
    now_s: float,
) -> AutoscaleState:
    """The smoothed demand, and capacity and length of requests as known now or last."""
    known = [one.capacity_tokens_per_s for one in replicas if one.capacity_tokens_per_s > 0]
    capacity = sum(known) / len(known) if known else state.replica_capacity
    lengths = [one.tokens_per_request for one in replicas]
    length = sum(lengths) / len(lengths) if lengths else state.tokens_per_request
    waiting = num_queued * length + sum(one.waiting_tokens for one in replicas)
    demand = sum(one.emitted_tokens_per_s for one in replicas) + waiting / settings.queue_time_s
    if state.at_s is not None:
        elapsed_s = max(0.0, now_s - state.at_s)
        constant_s = _RISE_S if demand > state.demand_tokens_per_s else _FALL_S
        share = 1.0 - math.exp(-elapsed_s / constant_s)
        demand = state.demand_tokens_per_s + share * (demand - state.demand_tokens_per_s)
    return AutoscaleState(now_s, demand, state.enough_since_s, capacity, length)


def _fewer(
    demand: float,
    busy: float,
    num_replicas: int,
    known: Sequence[float],
    settings: AutoscaleSettings,
    state: AutoscaleState,
) -> int:
    """The least number that the demand needs with some room. Serve chooses who goes: the fastest perhaps."""
    slowest_first = sorted([*known, *[state.replica_capacity] * (num_replicas - len(known))])
    usable = _DOWN_SHARE * settings.target_utilization
    for count in range(1, num_replicas):
        if demand <= usable * sum(slowest_first[:count]):
            break
    else:
        count = num_replicas
    if settings.min_replicas == 0 and busy == 0 and demand < 1.0:
        count = 0
    return max(count, settings.min_replicas)


def _within(num_replicas: int, settings: AutoscaleSettings) -> int:
    return min(max(num_replicas, settings.min_replicas), settings.max_replicas)
