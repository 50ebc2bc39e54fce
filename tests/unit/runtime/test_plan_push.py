"""Plans are sent to everyone, and a round that fails or takes long leaves the next one alone."""

import threading
from collections.abc import Iterator

import pytest
import zmq

from dspark_ray.core.clock import ManualClock
from dspark_ray.core.types import StepPlan
from dspark_ray.runtime.messages import ApplyPlan
from dspark_ray.runtime.plan_push import PERIOD_MS, PlanPush
from dspark_ray.runtime.transport import receive_all

PLANS = [StepPlan(name, 1, 1, "shared_cap", 5.0) for name in "abc"]


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_everyone_gets_their_plan(context: zmq.Context) -> None:
    sockets = {plan.replica_id: context.socket(zmq.PULL) for plan in PLANS}
    for name, socket in sockets.items():
        socket.bind(f"inproc://push-{name}")
    clock = ManualClock()
    due = [(f"inproc://push-{plan.replica_id}", plan) for plan in PLANS]
    push = PlanPush(lambda: due, context, clock)
    assert push.push() == PERIOD_MS
    assert push.num_rounds == 1
    for plan in PLANS:
        assert sockets[plan.replica_id].poll(5000)
        assert receive_all(sockets[plan.replica_id]) == [ApplyPlan(plan)]


def test_a_long_round_is_followed_by_as_long_a_rest(context: zmq.Context) -> None:
    clock = ManualClock()
    assert PlanPush(lambda: [], context, clock).push() == PERIOD_MS

    def slow() -> list[tuple[str, StepPlan]]:
        clock.advance(700.0)
        return []

    assert PlanPush(slow, context, clock).push() == 700.0


def test_a_round_that_fails_is_not_the_last(
    context: zmq.Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dspark_ray.runtime.plan_push.PERIOD_MS", 1.0)
    rounds, done = iter([ValueError("broken"), None]), threading.Event()

    def due() -> list[tuple[str, StepPlan]]:
        if (error := next(rounds, None)) is not None:
            raise error
        done.set()
        return []

    push = PlanPush(due, context, ManualClock())
    push.start()
    assert done.wait(5.0)
    push.close()
    assert "a round of plans was lost" in caplog.text
