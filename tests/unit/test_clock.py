"""Clocks go forwards; the manual one only when told to."""

import pytest

from dspark_ray.core.clock import ManualClock, SystemClock


def test_the_manual_clock_moves_when_told() -> None:
    clock = ManualClock(5.0)
    clock.advance(2.5)
    assert clock.now_ms() == 7.5
    assert clock.now_ms() == 7.5


def test_no_clock_goes_backwards() -> None:
    with pytest.raises(AssertionError):
        ManualClock().advance(-1)
    clock = SystemClock()
    times_ms = [clock.now_ms() for _ in range(100)]
    assert times_ms == sorted(times_ms)
