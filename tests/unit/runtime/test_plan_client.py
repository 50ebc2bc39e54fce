"""Reports leave one at a time; a scheduler that is gone is looked for again and costs nothing else."""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dspark_ray.core.clock import ManualClock
from dspark_ray.core.config import AppConfig, SchedulerConfig
from dspark_ray.core.types import StepPlan, SurvivalReport
from dspark_ray.runtime import plan_client
from dspark_ray.runtime.fleet_scheduler import FleetScheduler
from dspark_ray.runtime.plan_client import PlanClient
from tests.fakes import FakeEngine

CONFIG = SchedulerConfig(report_interval_ms=100.0)


class Actor:
    """A scheduler whose methods are called at once; `broken` is what it raises instead."""

    def __init__(self) -> None:
        self.scheduler = FleetScheduler("app", CONFIG, ManualClock())
        self.reports: list[SurvivalReport] = []
        self.broken: Exception | None = None
        self.num_found = 0

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args: (name, args))

    def get(self, call: tuple[str, tuple[Any, ...]], timeout: float) -> Any:
        name, args = call
        if self.broken is not None:
            raise self.broken
        if name == "report":
            self.reports.append(args[0])
        return getattr(self.scheduler, {"leave": "remove"}.get(name, name))(*args)


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Actor:
    actor = Actor()

    def find(app_name: str, config: SchedulerConfig, group: int) -> Actor:
        assert group == 0
        actor.num_found += 1
        return actor

    monkeypatch.setattr(plan_client, "find_or_start_scheduler", find)
    monkeypatch.setattr(plan_client.ray, "get", actor.get)
    return actor


class Bench:
    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        self.engine = FakeEngine(AppConfig(), step_ms=0.0)
        self.plans: list[StepPlan] = []
        self.arrived = threading.Event()
        self.client = PlanClient("app", CONFIG, "me", 7, self._deliver, self.clock, "tcp://here")

    def _deliver(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.arrived.set()

    def report(self) -> None:
        """One due report and the wait for its plan."""
        self.arrived.clear()
        self.clock.advance(CONFIG.report_interval_ms)
        self.client.tick(self.engine)
        assert self.arrived.wait(5.0)


@pytest.fixture
def bench(actor: Actor) -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.client.close()


def test_plans_answer_reports_and_the_table_is_sent_once(actor: Actor, bench: Bench) -> None:
    bench.client.start()
    bench.report()
    bench.report()
    assert [(report.sequence, report.table is None) for report in actor.reports] == [(1, False), (2, True)]
    assert [(plan.sequence, plan.generation) for plan in bench.plans] == [(1, 7), (2, 7)]
    assert actor.num_found == 1


def test_nothing_is_reported_early_or_beside_another_report(actor: Actor, bench: Bench) -> None:
    bench.client.tick(bench.engine)
    assert bench.client.wait_ms() == CONFIG.report_interval_ms
    bench.client.tick(bench.engine)
    bench.clock.advance(CONFIG.report_interval_ms)
    bench.client.tick(bench.engine)  # due, but the first one was not taken yet
    assert bench.client.wait_ms() == CONFIG.report_interval_ms
    bench.client.start()
    assert bench.arrived.wait(5.0)
    assert [report.sequence for report in actor.reports] == [1]


def test_the_scheduler_says_how_often_to_report(
    actor: Actor, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FleetScheduler, "interval_ms", 700.0)
    bench.client.start()
    bench.client.tick(bench.engine)
    eventually(lambda: bench.client._interval_ms == 700.0)
    bench.clock.advance(CONFIG.report_interval_ms)
    bench.client.tick(bench.engine)  # this one was due before the answer came
    assert bench.client.wait_ms() == 700.0
    eventually(lambda: len(actor.reports) == 2)
    assert {report.plan_address for report in actor.reports} == {"tcp://here"}


def test_a_scheduler_that_died_is_found_again_with_its_table_sent_anew(actor: Actor, bench: Bench) -> None:
    bench.client.start()
    bench.report()
    actor.broken = RuntimeError("dead")
    bench.clock.advance(CONFIG.report_interval_ms)
    bench.client.tick(bench.engine)
    eventually(lambda: bench.client._is_cut_off)
    actor.broken = None
    actor.scheduler = FleetScheduler("app", CONFIG, ManualClock())
    bench.report()
    assert actor.num_found == 2
    assert actor.reports[-1].table is not None


def test_leaving_takes_the_replica_out_at_once(actor: Actor, bench: Bench) -> None:
    bench.client.start()
    bench.report()
    assert list(actor.scheduler.state()["replicas"]) == ["me"]
    bench.client.close()
    assert actor.scheduler.state()["replicas"] == {}


def test_no_error_ends_the_thread(actor: Actor, bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.client.start()
    bench.report()
    plans = bench.client._deliver
    bench.client._deliver = lambda plan: [][0]  # type: ignore[assignment,misc]
    bench.clock.advance(CONFIG.report_interval_ms)
    bench.client.tick(bench.engine)
    eventually(lambda: "a plan was lost" in caplog.text)
    bench.client._deliver = plans
    actor.broken = TimeoutError()  # an error without a text
    bench.clock.advance(CONFIG.report_interval_ms)
    bench.client.tick(bench.engine)
    eventually(lambda: bench.client._is_cut_off)
    actor.broken = None
    bench.report()


def eventually(what: Callable[[], bool]) -> None:
    for _ in range(200):
        if what():
            return
        threading.Event().wait(0.01)
    pytest.fail("it did not happen")
