"""Plans and reports between the actor and vLLM's processes."""

import os
from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from dspark_ray.core.types import StepPlan
from dspark_ray.vllm_engine.link import (
    LINK_VARIABLE,
    CoreReport,
    LinkAddresses,
    PlanLink,
    PlanReceiver,
    ReportSender,
)

PLAN = StepPlan("replica", 7, 3, "shared_cap", 120.5, 900.0, 14.25)
REPORT = CoreReport(np.array([[0.9, 0.5]], dtype=np.float32), 12, {"rows": [1, 2]}, "digest")


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def newest_plan(receiver: PlanReceiver) -> StepPlan:
    for _ in range(1000):
        if (plan := receiver.newest()) is not None:
            return plan
    raise AssertionError("no plan arrived")


def newest_report(link: PlanLink) -> CoreReport:
    for _ in range(1000):
        if (report := link.newest_report()) is not None:
            return report
    raise AssertionError("no report arrived")


def test_a_plan_and_a_report(context: zmq.Context) -> None:
    link = PlanLink("inproc://a", context)
    receiver = PlanReceiver(link.addresses.plans, context)
    sender = ReportSender(link.addresses.reports, context)
    assert receiver.newest() is link.newest_report() is None
    link.send(StepPlan("replica", 7, 2, "shared_cap", None))
    link.send(PLAN)
    found = newest_plan(receiver)
    assert (found.generation, found.sequence) == (7, 3)
    assert (found.draft_tokens_per_s, found.ttl_ms, found.group_step_ms) == (120.5, 900.0, 14.25)
    assert receiver.newest() is None
    sender.send(CoreReport(np.zeros((0, 2), dtype=np.float32), 1, {}, ""))
    sender.send(REPORT)
    report = newest_report(link)
    assert report.survival.tolist() == REPORT.survival.tolist()
    assert (report.base_rows, report.table, report.table_digest) == (12, {"rows": [1, 2]}, "digest")
    link.close()


def test_nobody_waits_for_a_peer_that_is_gone(context: zmq.Context) -> None:
    """A full queue, or none that anybody reads: sends return, and what they carried is lost."""
    link = PlanLink("inproc://b", context)
    sender = ReportSender(link.addresses.reports, context)
    receiver = PlanReceiver(link.addresses.plans, context)
    for _ in range(100):
        sender.send(REPORT)
    link.close()
    for _ in range(100):
        sender.send(REPORT)
    assert receiver.newest() is None


def test_a_stray_packet_is_dropped(context: zmq.Context) -> None:
    link = PlanLink("inproc://c", context)
    receiver = PlanReceiver(link.addresses.plans, context)
    stray = context.socket(zmq.PUSH)
    stray.connect(link.addresses.reports)
    for packet in (b"", b"\xc1", b"\x93\x01\x02\x03", b"\x96\x02\x02\xc4\x00\x01\x80\xa0"):
        stray.send(packet)
    for _ in range(100):
        assert link.newest_report() is None
    link._plans.send(b"\x91\x01")
    for _ in range(100):
        assert receiver.newest() is None
    stray.close()
    link.close()


def test_addresses_travel_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LINK_VARIABLE, raising=False)
    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "MINE")
    assert LinkAddresses.from_environment() is None
    addresses = LinkAddresses("tcp://a:1", "tcp://a:2")
    for name, value in addresses.environment().items():
        monkeypatch.setenv(name, value)
    assert LinkAddresses.from_environment() == addresses
    assert os.environ["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"] == f"MINE,{LINK_VARIABLE}"
