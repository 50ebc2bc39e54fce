"""Reports in, plans out: shares of a cap, stale reports, silent replicas, tables by digest."""

from dataclasses import replace

import numpy as np
import pytest

from dspark_ray.core.clock import ManualClock
from dspark_ray.core.config import SchedulerConfig, TierConfig
from dspark_ray.core.errors import ConfigError
from dspark_ray.core.types import ServiceTier, SurvivalReport
from dspark_ray.runtime.fleet_scheduler import LIVE_INTERVALS, REPORT_COST_MS, FleetScheduler
from dspark_ray.scheduling.step_table import StepTable

TABLE = StepTable(np.array([1, 64]), np.array([5.0, 20.0]))
CAPPED = SchedulerConfig(policy="shared_cap", cap_draft_tokens_per_s=100.0, plan_ttl_ms=1000.0)


def report(
    replica_id: str = "a", sequence: int = 1, generation: int = 1, *, table: bool = True
) -> SurvivalReport:
    return SurvivalReport(
        replica_id=replica_id,
        generation=generation,
        sequence=sequence,
        survival=np.tile(np.array([0.8, 0.6, 0.4], np.float32), (4, 1)),
        base_rows=4,
        num_running=4,
        num_waiting=0,
        table_digest=TABLE.digest,
        table=TABLE.to_dict() if table else None,
        budget_tokens=6.0,
    )


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def fleet(clock: ManualClock) -> FleetScheduler:
    return FleetScheduler("app", CAPPED, clock)


def share(fleet: FleetScheduler, replica_id: str, sequence: int) -> float:
    reply = fleet.report(report(replica_id, sequence))
    assert reply.plan is not None
    assert reply.plan.draft_tokens_per_s is not None
    return reply.plan.draft_tokens_per_s


def test_a_cap_is_shared_and_halved(fleet: FleetScheduler) -> None:
    assert share(fleet, "a", 1) == pytest.approx(100.0)
    assert share(fleet, "b", 1) == pytest.approx(50.0)
    assert share(fleet, "a", 2) == pytest.approx(50.0)
    fleet.set_cap(50.0)
    assert share(fleet, "a", 3) == pytest.approx(25.0)
    assert share(fleet, "b", 2) == pytest.approx(25.0)
    fleet.remove("b")
    assert share(fleet, "a", 4) == pytest.approx(50.0)


def test_plans_carry_identity_number_and_lifetime(fleet: FleetScheduler) -> None:
    plan = fleet.report(report("a", sequence=7, generation=3)).plan
    assert plan is not None
    assert (plan.replica_id, plan.generation, plan.sequence, plan.ttl_ms) == ("a", 3, 7, 1000.0)


def test_long_rounds_are_followed_by_a_rest(
    clock: ManualClock, fleet: FleetScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = fleet.plans
    monkeypatch.setattr(fleet, "plans", lambda: (clock.advance(20.0), plans())[1])
    assert share(fleet, "a", 1) == pytest.approx(100.0)
    assert fleet.report(report("b", 1)).plan is None  # 20 ms of planning, 80 ms of rest
    assert share(fleet, "a", 2) == pytest.approx(100.0)
    clock.advance(81.0)
    assert share(fleet, "b", 2) == pytest.approx(50.0)
    fleet.set_cap(50.0)  # is not kept waiting
    assert share(fleet, "a", 3) == pytest.approx(25.0)


def test_stale_reports_get_no_plan(fleet: FleetScheduler) -> None:
    fleet.report(report("a", sequence=5, generation=2))
    assert fleet.report(report("a", sequence=5, generation=2)).plan is None
    assert fleet.report(report("a", sequence=9, generation=1)).plan is None
    assert fleet.report(report("a", sequence=1, generation=3)).plan is not None


def test_silent_replicas_leave_the_view(fleet: FleetScheduler, clock: ManualClock) -> None:
    share(fleet, "b", 1)
    clock.advance(600.0)
    assert share(fleet, "a", 1) == pytest.approx(50.0)
    clock.advance(600.0)
    assert share(fleet, "a", 2) == pytest.approx(100.0)
    assert list(fleet.state()["replicas"]) == ["a"]


def test_tables_are_asked_for_once(fleet: FleetScheduler) -> None:
    assert not fleet.report(report("a", 1, table=False)).knows_table
    assert fleet.report(report("a", 2, table=True)).knows_table
    assert fleet.report(report("b", 1, table=False)).knows_table


def test_a_broken_table_harms_nobody(fleet: FleetScheduler) -> None:
    broken = report("a", 1)
    broken.table["format"] = "other"  # type: ignore[index]
    reply = fleet.report(broken)
    assert reply.plan is not None
    assert not reply.knows_table


def test_only_a_policy_with_a_cap_takes_one(clock: ManualClock, fleet: FleetScheduler) -> None:
    with pytest.raises(ConfigError, match="shared_cap"):
        FleetScheduler("app", SchedulerConfig(), clock).set_cap(5.0)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError):
            fleet.set_cap(wrong)
    fleet.set_cap(None)
    plan = fleet.report(report()).plan
    assert plan is not None
    assert plan.draft_tokens_per_s is None


def test_weighted_plans_carry_all_tiers_and_split_a_cap(clock: ManualClock) -> None:
    config = SchedulerConfig(policy="weighted", tiers={ServiceTier.FLEX: TierConfig(weight=0.25)})
    fleet = FleetScheduler("app", config, clock)
    plan = fleet.report(report()).plan
    assert plan is not None
    assert [(one.tier, one.weight) for one in plan.tiers] == [
        (ServiceTier.FLEX, 0.25),
        (ServiceTier.DEFAULT, 1.0),
        (ServiceTier.PRIORITY, 1.0),
    ]
    assert (plan.target_boost, plan.draft_tokens_per_s) == (8.0, None)
    fleet.set_cap(30.0)
    assert share(fleet, "a", 2) == pytest.approx(30.0)


def test_the_same_configuration_keeps_the_cap_and_another_replaces_it(fleet: FleetScheduler) -> None:
    fleet.set_cap(10.0)
    fleet.configure(CAPPED)
    assert fleet.state()["cap_draft_tokens_per_s"] == 10.0
    fleet.configure(CAPPED.model_copy(update={"cap_draft_tokens_per_s": 70.0}))
    assert fleet.state()["cap_draft_tokens_per_s"] == 70.0
    fleet.configure(SchedulerConfig())
    assert fleet.state()["policy"] == "local"


def test_a_large_fleet_reports_less_often_and_is_sent_its_plans(clock: ManualClock) -> None:
    config = SchedulerConfig(
        policy="shared_cap", cap_draft_tokens_per_s=1500.0, report_interval_ms=20.0, plan_ttl_ms=100.0
    )
    fleet, num = FleetScheduler("app", config, clock), 50
    few = int(config.report_interval_ms / REPORT_COST_MS)
    for number in range(few):
        reply = fleet.report(replace(report(f"{number:02}"), plan_address=f"tcp://{number:02}"))
        assert reply.plan is not None
        assert (reply.interval_ms, fleet.pushed()) == (20.0, [])
    for number in range(few, num):
        reply = fleet.report(replace(report(f"{number:02}"), plan_address=f"tcp://{number:02}"))
        assert reply.interval_ms == REPORT_COST_MS * (number + 1)
        assert reply.plan is None  # it plans alone until the next push
    pushed = fleet.pushed()
    assert [address for address, _ in pushed] == [f"tcp://{number:02}" for number in range(num)]
    assert [plan.draft_tokens_per_s for _, plan in pushed] == pytest.approx([30.0] * num)
    clock.advance(10.0)
    assert fleet.report(report("00", 2)).plan is not None  # the one that was pushed
    clock.advance(LIVE_INTERVALS * REPORT_COST_MS * num - 11.0)  # longer than a plan lives
    assert len(fleet.plans()) == num
    clock.advance(2.0)
    assert len(fleet.plans()) == 1
    assert not fleet.pushes


def test_a_group_splits_its_part_of_the_cap(clock: ManualClock) -> None:
    config = SchedulerConfig(policy="shared_cap", cap_draft_tokens_per_s=100.0, num_groups=4)
    fleet = FleetScheduler("app", config, clock)
    assert share(fleet, "a", 1) == pytest.approx(25.0)  # until it is told
    demand = fleet.demand()
    assert demand is not None
    assert (demand.num_replicas, demand.num_unknown) == (1, 0)
    fleet.set_share(60.0)
    assert share(fleet, "a", 2) == pytest.approx(60.0)
    assert FleetScheduler("app", SchedulerConfig(), clock).demand() is None


def test_a_group_of_dead_replicas_demands_nothing(clock: ManualClock, fleet: FleetScheduler) -> None:
    """A killed replica says no farewell, and the last of a group is followed by no report."""
    fleet.report(report("a"))
    clock.advance(CAPPED.plan_ttl_ms + 1.0)
    demand = fleet.demand()
    assert demand is not None
    assert demand.num_replicas == 0
