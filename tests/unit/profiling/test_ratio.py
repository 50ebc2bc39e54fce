"""Ratios of throughput with their intervals."""

import numpy as np
import pytest

from dspark_ray.profiling.ratio import Run, throughput_ratio


def run(tokens_per_s: float, speeds: list[float]) -> Run:
    return Run(tokens_per_s, np.full(len(speeds), 100.0), 100.0 / np.array(speeds))


def test_equal_everywhere_has_no_width() -> None:
    mine, other = [run(200, [20.0] * 8)] * 3, [run(100, [10.0] * 8)] * 3
    ratio = throughput_ratio(mine, other)
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((2, 2, 2))


def test_what_slows_a_round_hits_both() -> None:
    mine = [run(speed, [20.0] * 8) for speed in (200, 100, 50)]
    other = [run(speed, [10.0] * 8) for speed in (100, 50, 25)]
    assert throughput_ratio(mine, other).high == pytest.approx(2)


def test_prompts_that_differ_and_rounds_that_differ_widen_it() -> None:
    same = [run(100, [10.0] * 8)] * 3
    uneven = throughput_ratio([run(150, [10.0, 30.0] * 4)] * 3, same)
    assert uneven.low < 1.4
    assert uneven.high > 1.6
    unsteady = throughput_ratio([run(speed, [10.0] * 8) for speed in (120, 150, 180)], same)
    assert (unsteady.low, unsteady.high) == pytest.approx((1.2, 1.8))


def test_the_interval_is_reproducible() -> None:
    mine, other = [run(150, [10.0, 30.0] * 4)] * 3, [run(100, [10.0] * 8)] * 3
    assert throughput_ratio(mine, other) == throughput_ratio(mine, other)
