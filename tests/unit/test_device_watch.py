"""Passes that wait on the device for longer than a step may take."""

from dspark_ray.core.clock import ManualClock
from dspark_ray.models.parallel.watch import DeviceWatch


class Pass:
    def __init__(self) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done


def test_the_oldest_pass_that_is_not_done_in_time_ends_the_process() -> None:
    clock, ends = ManualClock(), list[str]()
    watch = DeviceWatch(60.0, lambda: "rank 2 is behind in message 7", ends.append, clock)
    watch.close()  # its thread: this test looks itself
    first, second = Pass(), Pass()
    watch.note(first)
    clock.advance(50_000)
    watch.note(second)
    assert watch.look()
    first.is_done = True
    clock.advance(50_000)  # the second has waited 50 s
    assert watch.look()
    clock.advance(11_000)
    assert not watch.look()
    assert ends == ["a pass has waited 61 s on the device: rank 2 is behind in message 7"]


def test_a_device_without_work_is_never_late() -> None:
    clock, ends = ManualClock(), list[str]()
    watch = DeviceWatch(60.0, lambda: "nobody", ends.append, clock)
    done = Pass()
    done.is_done = True
    watch.note(done)
    clock.advance(10_000_000)
    assert watch.look()
    watch.close()
    assert not ends
