"""The token bucket that holds a replica to its share."""

import pytest

from dspark_ray.core.clock import ManualClock
from dspark_ray.scheduling.cap import TokenBucket


def spend(bucket: TokenBucket, clock: ManualClock, steps: int, step_ms: float, wanted: int) -> int:
    """Verify as much as allowed, up to `wanted` a step."""
    total = 0
    for _ in range(steps):
        taken = min(bucket.available(clock.now_ms()), wanted)
        bucket.take(taken)
        total += taken
        clock.advance(step_ms)
    return total


@pytest.mark.parametrize("rate", [0.5, 7.0, 33.3, 1000.0])
@pytest.mark.parametrize("step_ms", [1.7, 40.0])
def test_the_rate_is_met_over_time_fractions_included(rate, step_ms):
    bucket, clock = TokenBucket(rate, burst=64), ManualClock(5e6)
    spend(bucket, clock, 1, step_ms, 64)  # the first fill
    steps = int(20_000 / step_ms)
    assert spend(bucket, clock, steps, step_ms, 1000) == pytest.approx(rate * steps * step_ms / 1e3, abs=2)


def test_credit_is_kept_up_to_the_burst():
    bucket, clock = TokenBucket(100.0, burst=10), ManualClock()
    assert bucket.available(clock.now_ms()) == 10
    bucket.take(10)
    clock.advance(50)
    assert bucket.available(clock.now_ms()) == 5
    clock.advance(1e6)
    assert bucket.available(clock.now_ms()) == 10


def test_halving_the_rate_halves_what_is_spent_within_a_second():
    bucket, clock = TokenBucket(200.0, burst=64), ManualClock()
    spend(bucket, clock, 100, 20.0, 64)
    before = spend(bucket, clock, 50, 20.0, 64)
    bucket.set_rate(100.0)
    assert spend(bucket, clock, 50, 20.0, 64) == pytest.approx(before / 2, abs=2)


def test_a_cut_shrinks_savings_and_a_rise_keeps_them():
    bucket = TokenBucket(100.0, burst=40)
    bucket.set_rate(25.0)
    assert bucket.available(0.0) == 10
    bucket.set_rate(100.0)
    assert bucket.available(0.0) == 10
    assert bucket.rate_per_s == 100.0


def test_rate_zero_stops_and_comes_back():
    bucket, clock = TokenBucket(100.0, burst=8), ManualClock()
    bucket.set_rate(0.0)
    assert spend(bucket, clock, 50, 20.0, 8) == 0
    bucket.set_rate(100.0)
    assert spend(bucket, clock, 51, 20.0, 8) == pytest.approx(100, abs=2)


def test_debt_is_paid_off_first_and_backward_time_earns_nothing():
    bucket = TokenBucket(100.0, burst=4)
    assert bucket.available(1000.0) == 4
    bucket.take(9)
    assert bucket.available(1000.0) == 0
    assert bucket.available(500.0) == 0
    assert bucket.available(549.0) == 0
    assert bucket.available(575.0) == 2  # −5 and 75 ms


def test_a_share_that_grows_from_nothing_is_used_in_full():
    bucket, clock = TokenBucket(0.0, burst=0.0), ManualClock()
    assert spend(bucket, clock, 10, 100.0, 64) == 1
    bucket.set_rate(200.0, burst=50.0)
    assert spend(bucket, clock, 50, 100.0, 64) == pytest.approx(1000, abs=20)
    bucket.set_rate(200.0, burst=5.0)
    assert bucket.available(clock.now_ms()) <= 5
