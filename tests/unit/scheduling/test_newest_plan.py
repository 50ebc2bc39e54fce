"""Plans in order and in time."""

from dspark_ray.core.types import StepPlan
from dspark_ray.scheduling.newest_plan import NewestPlan


def plan(generation: int, sequence: int, ttl_ms: float = 100.0) -> StepPlan:
    return StepPlan("r", generation, sequence, "local", ttl_ms=ttl_ms)


def test_the_newest_counts() -> None:
    newest = NewestPlan()
    assert newest.offer(plan(1, 2), 0.0)
    assert not newest.offer(plan(1, 1), 10.0)
    assert newest.age_ms(10.0) == 10.0  # the older one does not make it younger
    assert newest.offer(plan(2, 1), 20.0)  # of the next incarnation
    assert newest.at(20.0) == plan(2, 1)


def test_it_expires_by_its_own_time() -> None:
    newest = NewestPlan()
    assert newest.at(0.0) is newest.age_ms(0.0) is None
    newest.offer(plan(1, 5), 0.0)
    assert newest.at(100.0) is not None
    assert newest.at(100.1) is newest.age_ms(100.1) is None
    assert newest.offer(plan(1, 1), 200.0)  # nothing is known any more that would be newer
