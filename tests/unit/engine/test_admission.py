"""Turns in the queue: levels go first, by a bounded number of arrivals; preemption is the reverse."""

from dspark_ray.core.types import Priority, Request, SamplingParams, ServiceTier
from dspark_ray.engine.admission import Admission
from dspark_ray.engine.block_pool import BlockPool
from dspark_ray.engine.sequence import LEVEL_ARRIVALS, Sequence

NORMAL = Priority()
FIRST = Priority(ServiceTier.PRIORITY)


def admission(num_blocks: int = 1000, max_running: int = 64) -> Admission:
    pool = BlockPool(num_blocks, 4, False)
    return Admission(
        pool,
        lambda sequence: None,
        max_running=max_running,
        max_step_rows=512,
        max_waiting=1000,
        max_model_len=64,
    )


def add(queue: Admission, name: str, priority: Priority = NORMAL) -> Sequence:
    return queue.add(Request(name, (1, 2, 3), SamplingParams(max_tokens=5), priority=priority))


def names(queue: Admission) -> list[str]:
    return [sequence.request.request_id for sequence in queue.waiting]


def test_tiers_and_levels_go_first_and_equals_in_order_of_arrival() -> None:
    queue = admission()
    add(queue, "late", Priority(ServiceTier.FLEX))
    for name in ("a", "b"):
        add(queue, name)
    add(queue, "first", FIRST)
    add(queue, "urgent", Priority(level=-2))
    add(queue, "c")
    assert names(queue) == ["urgent", "first", "a", "b", "c", "late"]


def test_whoever_waits_is_overtaken_by_a_bounded_number() -> None:
    queue = admission()
    add(queue, "patient")
    for number in range(LEVEL_ARRIVALS + 20):
        add(queue, f"{number}", FIRST)
    assert names(queue).index("patient") == LEVEL_ARRIVALS - 1


def test_the_last_in_turn_is_preempted_and_keeps_its_place() -> None:
    queue = admission(num_blocks=2)
    add(queue, "normal")
    add(queue, "first", FIRST)
    queue.fill([], [])
    for sequence in queue.running:  # both have emitted a token: each needs a block for its fifth
        sequence.token_ids += [7, 7]
        sequence.num_computed = 4
    assert [s.request.request_id for s in queue.make_room()] == ["first"]
    add(queue, "last")
    add(queue, "other", FIRST)
    assert names(queue) == ["other", "normal", "last"]
