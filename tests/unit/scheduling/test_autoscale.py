"""Replicas follow demand: up before anything queues, down after a while, still under noise."""

import math

import numpy as np
import pytest

from dspark_ray.core.types import EngineStats, SpeculationCounters
from dspark_ray.scheduling.autoscale import (
    AutoscaleSettings,
    AutoscaleState,
    ReplicaDemand,
    decide,
    replica_demand,
)

SETTINGS = AutoscaleSettings(1, 5, 0.8, 1.0, 20.0)
CAPACITY = 100.0  # tokens/s of one replica


class Fleet:
    """Equal replicas under a demand in tokens/s; what they cannot serve waits."""

    def __init__(self, num_replicas: int = 1, settings: AutoscaleSettings = SETTINGS) -> None:
        self.num_replicas, self.settings = num_replicas, settings
        self.state, self.now_s, self.waiting, self.seen = AutoscaleState(), 0.0, 0.0, [num_replicas]

    def run(self, demand: float, seconds: float, start_s: float = 0.0, step_s: float = 0.5) -> None:
        """Replicas that are started serve after `start_s`."""
        running, ready_s = self.num_replicas, math.inf
        for _ in range(int(seconds / step_s)):
            self.now_s += step_s
            if self.num_replicas != running and self.now_s >= ready_s:
                running = self.num_replicas
            offered = demand * step_s + self.waiting
            served = min(offered, running * CAPACITY * step_s)
            self.waiting = offered - served
            each = ReplicaDemand(
                served / step_s / max(running, 1),
                self.waiting / max(running, 1),
                50.0,
                CAPACITY,
                float(served > 0),
            )
            queued = self.waiting / 50.0 if running == 0 else 0.0
            decision = decide(
                [each] * running, queued, self.num_replicas, self.settings, self.state, self.now_s
            )
            self.state = decision.state
            if decision.num_replicas != self.num_replicas:
                ready_s = self.now_s + (start_s if decision.num_replicas > self.num_replicas else 0.0)
                self.num_replicas = decision.num_replicas
            self.seen.append(self.num_replicas)


def test_it_scales_before_anything_waits() -> None:
    fleet = Fleet()
    fleet.run(60.0, 10)
    assert fleet.num_replicas == 1
    fleet.run(90.0, 20)
    assert (fleet.num_replicas, fleet.waiting) == (2, 0.0)


def test_it_follows_a_burst_up_and_comes_back() -> None:
    fleet = Fleet()
    fleet.run(30.0, 10)
    fleet.run(230.0, 40, start_s=5.0)
    assert fleet.num_replicas >= 3
    assert fleet.waiting == 0.0
    fleet.run(30.0, 120)
    assert fleet.num_replicas == 1
    assert max(fleet.seen) <= 5


def test_noise_does_not_move_it() -> None:
    rng = np.random.default_rng(0)
    fleet = Fleet(2)
    for _ in range(400):
        fleet.run(float(rng.uniform(90.0, 150.0)), 0.5)
    assert set(fleet.seen) == {2}


def test_a_queue_is_demand_even_while_throughput_stands_still() -> None:
    each = ReplicaDemand(70.0, 200.0, 50.0, CAPACITY, 9.0)
    assert decide([each], 0.0, 1, SETTINGS, AutoscaleState(), 0.0).num_replicas == 4
    assert decide([each], 0.0, 4, SETTINGS, AutoscaleState(), 0.0).num_replicas == 4  # three are starting


def test_the_speed_target_counts_not_the_peak() -> None:
    """A replica that emits more than it can at the target speed is too full."""
    each = ReplicaDemand(150.0, 0.0, 50.0, CAPACITY, 30.0)
    assert decide([each], 0.0, 1, SETTINGS, AutoscaleState(), 0.0).num_replicas == 2


def test_zero_is_reached_and_left_only_where_it_is_allowed() -> None:
    fleet = Fleet(1, AutoscaleSettings(0, 3, 0.8, 1.0, 20.0))
    fleet.run(50.0, 10)
    fleet.run(0.0, 150)
    assert fleet.num_replicas == 0
    fleet.run(50.0, 2)
    assert fleet.num_replicas == 1
    never = Fleet(1)
    never.run(0.0, 150)
    assert never.num_replicas == 1


def test_without_figures_it_stays_within_its_bounds() -> None:
    assert decide([], 0.0, 2, SETTINGS, AutoscaleState(), 0.0).num_replicas == 2
    assert decide([], 0.0, 9, SETTINGS, AutoscaleState(), 0.0).num_replicas == 5
    blind = ReplicaDemand(50.0, 0.0, 50.0, 0.0, 1.0)
    assert decide([blind], 0.0, 1, SETTINGS, AutoscaleState(), 0.0).num_replicas == 1


def test_demand_is_read_from_two_snapshots() -> None:
    def stats(emitted: int, finished: int, waiting: int) -> EngineStats:
        counters = SpeculationCounters(4, emitted_tokens=emitted)
        return EngineStats(
            "e", counters, 3, waiting, 0, 1, num_finished=finished, rates=((1, 50.0), (4, 120.0))
        )

    demand = replica_demand(stats(900, 9, 2), stats(600, 6, 0), 2.0, 25.0)
    assert demand == ReplicaDemand(150.0, 200.0, 100.0, pytest.approx(120.0), 5.0)
    assert replica_demand(stats(900, 0, 1), None, 0.0, 25.0).emitted_tokens_per_s == 0.0
