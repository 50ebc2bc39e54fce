"""Turns in the queue: levels go first, by a bounded number of arrivals; preemption is the reverse. Shares of
the queue by client, and who has to go when it is full or time is up."""

import random
from collections import Counter
from typing import Any

import pytest

from dspark_ray.core.clock import ManualClock
from dspark_ray.core.errors import QueueFullError, StartDeadlineError
from dspark_ray.core.types import Priority, Request, SamplingParams, ServiceTier
from dspark_ray.engine.admission import Admission
from dspark_ray.engine.block_pool import BlockPool
from dspark_ray.engine.sequence import LEVEL_ARRIVALS, Sequence

NORMAL = Priority()
FIRST = Priority(ServiceTier.PRIORITY)
FLEX = Priority(ServiceTier.FLEX)


def admission(
    num_blocks: int = 1000, max_running: int = 64, max_waiting: int = 1000, clock: ManualClock | None = None
) -> Admission:
    pool = BlockPool(num_blocks, 4, False)
    return Admission(
        pool,
        lambda sequence: None,
        max_running=max_running,
        max_step_rows=512,
        max_waiting=max_waiting,
        max_model_len=64,
        clock=clock or ManualClock(),
    )


def add(queue: Admission, name: str, priority: Priority = NORMAL, **fields: Any) -> Sequence:
    return queue.add(Request(name, (1, 2, 3), SamplingParams(max_tokens=5), priority=priority, **fields))


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
    assert names(queue).index("patient") == LEVEL_ARRIVALS


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


# -- shares ----------------------------------------------------------------------------------------


def start_one(queue: Admission) -> str:
    """The first in turn starts and is done at once; its client."""
    sequence = queue.waiting.first
    queue.waiting.start_first()
    return sequence.request.client


def test_a_client_with_a_long_queue_does_not_delay_the_others() -> None:
    queue = admission()
    for number in range(100):
        add(queue, f"a{number}", client="a")
    for number in range(3):
        add(queue, f"b{number}", client="b")
    assert names(queue)[:6] == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_who_was_quiet_saves_nothing_up() -> None:
    queue = admission()
    for number in range(50):
        add(queue, f"a{number}", client="a")
    for _ in range(40):
        start_one(queue)
    for number in range(10):
        add(queue, f"b{number}", client="b")
    served = Counter(start_one(queue) for _ in range(10))
    assert abs(served["a"] - served["b"]) <= 1


def test_patient_requests_do_not_delay_urgent_ones_of_the_same_client() -> None:
    queue = admission()
    for number in range(200):
        add(queue, f"a{number}", FLEX, client="a")
    add(queue, "b", FIRST, client="b")
    add(queue, "urgent", FIRST, client="a")
    assert names(queue)[:2] == ["b", "urgent"]


@pytest.mark.parametrize("seed", range(5))
def test_clients_that_always_wait_get_equal_shares(seed: int) -> None:
    """Whatever they send and however much: in every stretch in which two of them have something waiting,
    what each got differs by two of the largest requests at most."""
    rng, queue = random.Random(seed), admission()
    clients, cost = "abcd", Counter[str]()
    waiting, number = Counter[str](), 0
    for _ in range(400):
        for client in clients:
            while waiting[client] < 3 + (client == "a") * 50:
                length = rng.randint(1, 60 if client != "d" else 4)
                queue.add(
                    Request(f"{number}", tuple(range(length)), SamplingParams(max_tokens=4), client=client)
                )
                waiting[client] += 1
                number += 1
        sequence = queue.waiting.first
        queue.waiting.start_first()
        waiting[sequence.request.client] -= 1
        cost[sequence.request.client] += sequence.cost
        assert max(cost.values()) - min(cost[client] for client in clients) <= 2.0


@pytest.mark.parametrize("busy", [FIRST, Priority(ServiceTier.PRIORITY, level=-8), FLEX])
def test_a_busy_level_takes_no_share_from_the_short_queue_of_another(busy: Priority) -> None:
    """Within a level, who sends one request at a time gets as many through as who has twenty waiting."""
    queue = admission()
    for number in range(20):
        add(queue, f"a{number}", client="a")
        add(queue, f"p{number}", busy, client="p")
    add(queue, "b0", client="b")
    served = Counter[str]()
    for number in range(2000):
        client = start_one(queue)
        served[client] += 1
        add(queue, f"{client}+{number}", busy if client == "p" else NORMAL, client=client)
    assert abs(served["a"] - served["b"]) <= 2


def test_long_requests_take_more_of_a_share() -> None:
    queue = admission()
    queue.max_model_len = 4096
    for number in range(4):
        queue.add(Request(f"a{number}", (1,) * 700, SamplingParams(max_tokens=68), client="a"))  # cost 3
    for number in range(8):
        add(queue, f"b{number}", client="b")
    assert [start_one(queue) for _ in range(8)] == list("abbbabbb")


@pytest.mark.parametrize("seed", range(5))
def test_whoever_waits_starts_in_the_end(seed: int) -> None:
    """Under an endless flood of higher tiers and of other clients."""
    rng, queue = random.Random(seed), admission()
    queue.max_model_len = 4096
    add(queue, "patient", FLEX, client="patient")
    for number in range(3000):
        for client in "ab":
            length = rng.randint(1, 600)
            fields = {"priority": FIRST, "client": client}
            queue.add(Request(f"{client}{number}", (1,) * length, SamplingParams(max_tokens=1), **fields))
        if start_one(queue) == "patient":
            break
    else:
        pytest.fail("it starved")
    assert number <= 2 * 2 * LEVEL_ARRIVALS + 2


# -- a full queue ----------------------------------------------------------------------------------


def shed(queue: Admission) -> list[str]:
    return [name for name, _ in queue.waiting.take_shed()]


def test_when_it_is_full_the_lowest_tier_goes_first() -> None:
    queue = admission(max_waiting=4)
    for name, priority in (("f0", FLEX), ("f1", FLEX), ("n0", NORMAL), ("n1", NORMAL)):
        add(queue, name, priority)
    with pytest.raises(QueueFullError):
        add(queue, "f2", FLEX)
    add(queue, "n2")
    assert shed(queue) == ["f1"]
    add(queue, "p0", FIRST)
    add(queue, "p1", FIRST)
    assert shed(queue) == ["f0", "n2"]
    with pytest.raises(QueueFullError):
        add(queue, "n3")
    assert names(queue) == ["p0", "p1", "n0", "n1"]
    assert queue.waiting.num_refused == 5
    assert shed(queue) == []


def test_a_flood_of_one_client_leaves_the_others_their_places() -> None:
    queue = admission(max_waiting=4)
    for number in range(4):
        add(queue, f"a{number}", client="a")
    with pytest.raises(QueueFullError):
        add(queue, "a4", client="a")
    add(queue, "b0", client="b")
    add(queue, "b1", client="b")
    assert shed(queue) == ["a3", "a2"]
    for name, client in (("b2", "b"), ("a5", "a")):
        with pytest.raises(QueueFullError):
            add(queue, name, client=client)
    assert names(queue) == ["a0", "b0", "a1", "b1"]


def test_what_has_begun_is_never_refused() -> None:
    queue = admission(max_waiting=2)
    add(queue, "f0", FLEX, has_begun=True)
    add(queue, "f1", FLEX, emitted_token_ids=(7,))
    with pytest.raises(QueueFullError):
        add(queue, "p0", FIRST)
    add(queue, "f2", FLEX, emitted_token_ids=(7,), start_within_ms=0.0)  # beyond the bound
    queue.waiting.expire()
    assert shed(queue) == []
    assert names(queue) == ["f0", "f1", "f2"]


def test_a_refused_request_takes_no_share() -> None:
    queue = admission(max_waiting=2)
    add(queue, "a0", client="a")
    add(queue, "b0", client="b")
    for number in range(50):
        with pytest.raises(QueueFullError):
            add(queue, f"x{number}", client="a")
    start_one(queue)
    start_one(queue)
    add(queue, "a1", client="a")
    add(queue, "b1", client="b")
    assert names(queue) == ["a1", "b1"]


# -- time ------------------------------------------------------------------------------------------


def test_who_has_not_started_in_time_is_taken_out() -> None:
    clock = ManualClock()
    queue = admission(clock=clock)
    add(queue, "patient")
    add(queue, "hasty", start_within_ms=100.0)
    clock.advance(99)
    queue.waiting.expire()
    assert shed(queue) == []
    clock.advance(1)
    queue.waiting.expire()
    ((name, error),) = queue.waiting.take_shed()
    assert name == "hasty"
    assert isinstance(error, StartDeadlineError)
    assert names(queue) == ["patient"]


def test_who_cannot_start_in_time_is_refused_at_once() -> None:
    clock = ManualClock()
    queue = admission(clock=clock)
    for number in range(20):
        add(queue, f"{number}")
    add(queue, "unknown", start_within_ms=1.0)  # nothing has started: nothing is known
    for _ in range(10):
        clock.advance(50)
        queue.waiting.start_first()
    with pytest.raises(StartDeadlineError, match=r"10 requests go first|11 requests go first"):
        add(queue, "hasty", start_within_ms=300.0)
    add(queue, "in time", start_within_ms=1000.0)
    add(queue, "important", FIRST, start_within_ms=100.0)  # it goes first


def test_an_empty_queue_refuses_nobody_for_time() -> None:
    """However it became empty: time in which nobody waited says nothing of the rate of starts."""
    clock = ManualClock()
    queue = admission(clock=clock)
    for number in range(6):
        add(queue, f"{number}", start_within_ms=5000.0)
    for _ in range(5):
        queue.waiting.start_first()
    clock.advance(6000)
    queue.waiting.expire()  # the sixth leaves the queue without a start
    assert names(queue) == []
    clock.advance(3.6e6)
    add(queue, "the only one", start_within_ms=5000.0)
    assert names(queue) == ["the only one"]


def test_a_preempted_request_has_started() -> None:
    clock = ManualClock()
    queue = admission(clock=clock)
    add(queue, "hasty", start_within_ms=100.0)
    queue.fill([], [])
    queue._preempt(queue.running[0])
    clock.advance(1000)
    queue.waiting.expire()
    assert shed(queue) == []
    assert names(queue) == ["hasty"]
