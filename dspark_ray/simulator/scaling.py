"""Replicas that come and go with the demand: the program's autoscaling decision on the simulation's clock.

Serve's part is played here: it starts replicas, which take their kind's start-up time, and drains those that
go: they get no new requests, and end when their last one has.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_ray.core.config import AutoscalingConfig
from dspark_ray.core.types import IntArray
from dspark_ray.scheduling.autoscale import (
    UNKNOWN_TOKENS,
    AutoscaleSettings,
    AutoscaleState,
    ReplicaDemand,
    decide,
)
from dspark_ray.scheduling.load import capacity_at
from dspark_ray.simulator.fleet import Fleet
from dspark_ray.simulator.law import Floats
from dspark_ray.simulator.routing import ReplicaFacts


@dataclass(frozen=True, slots=True)
class Orders:
    """What Serve is to do. [n] replicas"""

    start: IntArray
    cancel: IntArray  # of those that are starting


class Scaling:
    """Of one run. Begins with `min_replicas`, all of them ready."""

    def __init__(self, config: AutoscalingConfig, fleet: Fleet, facts: list[ReplicaFacts]) -> None:
        self._fleet, self._dry_run = fleet, config.dry_run
        self._settings = AutoscaleSettings(
            config.min_replicas,
            config.max_replicas,
            config.target_utilization,
            config.queue_time_s,
            config.down_after_s,
        )
        self._capacity = [capacity_at(one.rates, config.target_tokens_per_s) for one in facts]
        self._period_ms = config.stats_period_s * 1e3
        self._next_ms = 0.0
        self._state = AutoscaleState()
        self._emitted = np.zeros(len(facts), dtype=np.int64)  # [N] at the last look
        self.starting = np.zeros(len(facts), dtype=bool)
        self.draining = np.zeros(len(facts), dtype=bool)
        fleet.up[config.min_replicas :] = False

    @property
    def ready(self) -> NDArray[np.bool_]:
        """Those that take requests. [N]"""
        return self._fleet.up & ~self.draining

    def round(self, now_ms: float, num_queued: int) -> Orders:
        """Decides, if it is time to. num_queued: requests that no replica has taken"""
        none = np.zeros(0, dtype=np.int64)
        self._end_drained()
        if now_ms < self._next_ms:
            return Orders(none, none)
        self._next_ms = now_ms + self._period_ms
        now = int(self.ready.sum() + self.starting.sum())
        decision = decide(self._demands(), num_queued, now, self._settings, self._state, now_ms / 1e3)
        self._state = decision.state
        if self._dry_run:
            return Orders(none, none)
        if decision.num_replicas >= now:
            off = np.flatnonzero(~self._fleet.up & ~self.starting)
            return Orders(off[: decision.num_replicas - now], none)
        return Orders(none, self._remove(now - decision.num_replicas))

    def _demands(self) -> list[ReplicaDemand]:
        fleet = self._fleet
        emitted = fleet.num_emitted - self._emitted
        self._emitted = fleet.num_emitted.copy()
        running, waiting = fleet.num_running, fleet.num_waiting
        demands = []
        for replica in np.flatnonzero(self.ready):
            ended = int(fleet.num_ended[replica])
            per_request = fleet.num_emitted[replica] / ended if ended else UNKNOWN_TOKENS
            demands.append(
                ReplicaDemand(
                    emitted_tokens_per_s=float(emitted[replica]) / self._period_ms * 1e3,
                    waiting_tokens=float(waiting[replica] * per_request),
                    tokens_per_request=float(per_request),
                    capacity_tokens_per_s=self._capacity[replica],
                    num_requests=float(running[replica] + waiting[replica]),
                )
            )
        return demands

    def _remove(self, count: int) -> IntArray:
        """Those that are starting first, then those with the fewest requests. → the former"""
        cancelled = np.flatnonzero(self.starting)[::-1][:count]
        load = self._fleet.num_running + self._fleet.num_waiting
        ready = np.flatnonzero(self.ready)
        leaving = ready[np.argsort(load[ready], kind="stable")][: count - len(cancelled)]
        self.draining[leaving] = True
        self._end_drained()
        return cancelled

    def _end_drained(self) -> None:
        load = self._fleet.num_running + self._fleet.num_waiting
        gone = self.draining & (load == 0)
        self._fleet.up[gone] = False
        self.draining &= self._fleet.up  # also those that died meanwhile


class Presence:
    """How many replicas are paid for, over time: from the order to the end of the drain."""

    def __init__(self, num_replicas: int, from_ms: float) -> None:
        self._from_ms = self._last_ms = from_ms
        self.paid_ms: Floats = np.zeros(num_replicas)  # [N] after `from_ms`
        self.history: list[tuple[float, int, int]] = []  # (ms, ready, paid for), at every change

    def note(self, now_ms: float, ready: NDArray[np.bool_], paid: NDArray[np.bool_]) -> None:
        """As it is until the next call. Both [N]."""
        point = (int(ready.sum()), int(paid.sum()))
        if not self.history or self.history[-1][1:] != point:
            self.history.append((now_ms, *point))

    def pay(self, paid: NDArray[np.bool_], until_ms: float) -> None:
        """Who has been there since the last call."""
        self.paid_ms[paid] += max(0.0, until_ms - self._last_ms)
        self._last_ms = max(self._last_ms, until_ms)

    @property
    def mean(self) -> float:
        """Replicas paid for, on average."""
        measured_ms = self._last_ms - self._from_ms
        return float(self.paid_ms.sum() / measured_ms) if measured_ms > 0 else 0.0

    def ready_at(self, times_ms: Floats) -> IntArray:
        """[n] → [n]"""
        at = np.searchsorted([ms for ms, _, _ in self.history], times_ms, side="right") - 1
        return np.array([ready for _, ready, _ in self.history], dtype=np.int64)[np.maximum(at, 0)]
