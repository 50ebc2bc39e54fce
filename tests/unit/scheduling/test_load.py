"""Throughput by requests, and the most that keeps each request's speed."""

import numpy as np
import pytest

from dspark_ray.core.types import EngineStats, SpeculationCounters
from dspark_ray.scheduling.load import ReplicaLoad, capacity_at, request_counts, throughput_curve
from dspark_ray.scheduling.step_table import StepTable

TABLE = StepTable(rows=[1, 101], verify_ms=[10.0, 110.0], requests=[1, 100], draft_ms=[1.0, 2.0])
FLAT = StepTable(rows=[1, 100], verify_ms=[10.0, 10.0], requests=[1, 100], draft_ms=[1.0, 1.0])


def test_curves_hold_the_better_of_speculating_and_not() -> None:
    plain = throughput_curve(np.zeros(3), TABLE, None, (1, 4))
    assert plain == ((1, pytest.approx(100.0)), (4, pytest.approx(4e3 / 13.0)))
    good = throughput_curve(np.array([0.9, 0.8, 0.7]), FLAT, None, (1, 4))
    assert good == ((1, pytest.approx(3.4e3 / 11.0)), (4, pytest.approx(4 * 3.4e3 / 11.0)))


def test_counts_double_up_to_the_most() -> None:
    assert request_counts(1) == (1,)
    assert request_counts(5) == (1, 2, 4, 5)
    assert request_counts(64) == (1, 2, 4, 8, 16, 32, 64)


def test_capacity_is_the_throughput_at_which_each_request_has_its_speed() -> None:
    rates = throughput_curve(np.zeros(3), TABLE, None, tuple(range(1, 101)))
    exact = capacity_at(rates, 50.0)  # n / (9 + n) × 1000 ≥ 50 n: n ≤ 11
    assert exact == pytest.approx(550.0)
    coarse = capacity_at(throughput_curve(np.zeros(3), TABLE, None, request_counts(100)), 50.0)
    assert coarse == pytest.approx(550.0, rel=0.1)
    assert capacity_at(rates, 200.0) == 0.0
    assert capacity_at(rates, 0.1) == rates[-1][1]
    assert capacity_at((), 1.0) == 0.0


def test_a_load_is_read_from_stats() -> None:
    stats = EngineStats(
        "e",
        SpeculationCounters(4),
        3,
        1,
        6,
        10,
        max_running=8,
        kv_block_size=16,
        rates=((2, 100.0), (4, 150.0)),
    )
    load = ReplicaLoad.of(stats)
    assert load.free_tokens == 64
    assert [load.tokens_per_s(n) for n in (0, 1, 3, 9)] == [0.0, 50.0, 125.0, 150.0]
