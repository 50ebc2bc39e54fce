"""A replica's side of central scheduling: reports go out and plans come in off the step thread.

The loop's thread calls `tick` and `wait_ms`; the Ray calls happen on a thread of its own, one at a time, so
there is never more than one report in flight and no reply can overtake another. While the scheduler does
not answer, the replica plans alone: its last plan expires in the engine.
"""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from dspark_ray.core.clock import Clock
from dspark_ray.core.config import SchedulerConfig
from dspark_ray.core.types import StepPlan, SurvivalReport
from dspark_ray.runtime.engine_loop import StepEngine
from dspark_ray.runtime.fleet_scheduler import PlanReply
from dspark_ray.runtime.scheduler_actor import find_or_start_scheduler
from dspark_ray.scheduling.groups import group_of

logger = logging.getLogger(__name__)

REPLY_TIMEOUT_S = 2.0
LEAVE_TIMEOUT_S = 1.0
RESOLVE_TIMEOUT_S = 30.0  # a new scheduler's process has to start


class PlanClient:
    """Reports every `report_interval_ms`, in a large fleet less often, and hands plans to `deliver` (on the
    client's own thread)."""

    def __init__(
        self,
        app_name: str,
        config: SchedulerConfig,
        replica_id: str,
        generation: int,
        deliver: Callable[[StepPlan], None],
        clock: Clock,
        plan_address: str = "",
    ) -> None:
        """plan_address: where the scheduler may send plans unasked"""
        self._app_name = app_name
        self._config = config
        self._replica_id = replica_id
        self._group = group_of(replica_id, config.num_groups)
        self._generation = generation
        self._deliver = deliver
        self._clock = clock
        self._plan_address = plan_address
        self._interval_ms = config.report_interval_ms  # or longer, as the scheduler says
        self._reports: queue.Queue[SurvivalReport] = queue.Queue(maxsize=1)
        self._sequence = 0
        self._due_ms = 0.0
        self._table_is_known = False
        self._scheduler: Any = None
        self._is_cut_off = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dspark-plans", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Tells the scheduler that this replica leaves, and waits briefly: its process may end next."""
        self._closed.set()
        scheduler = self._scheduler
        if scheduler is not None:
            try:
                ray.get(scheduler.leave.remote(self._replica_id), timeout=LEAVE_TIMEOUT_S)
            except RayError as error:
                logger.info("could not tell the scheduler: %s", _first_line(error))

    # -- the loop's thread -------------------------------------------------------------------------

    def tick(self, engine: StepEngine) -> None:
        """Makes a report if one is due and the last one is on its way."""
        now_ms = self._clock.now_ms()
        if now_ms < self._due_ms:
            return
        self._due_ms = now_ms + self._interval_ms
        if self._reports.empty():
            self._sequence += 1
            report = engine.make_report(
                self._replica_id, self._generation, self._sequence, not self._table_is_known
            )
            self._reports.put(replace(report, plan_address=self._plan_address))

    def wait_ms(self) -> float:
        """Until the next report is due."""
        return max(0.0, self._due_ms - self._clock.now_ms())

    # -- the client's own thread -------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                report = self._reports.get(timeout=1.0)
            except queue.Empty:
                continue
            try:
                self._report(report)
            except Exception:  # of whatever kind: a thread that ends would never be missed
                logger.exception("a plan was lost")
                self._closed.wait(self._config.report_interval_ms / 1e3)

    def _report(self, report: SurvivalReport) -> None:
        if (reply := self._exchange(report)) is not None:
            self._table_is_known = reply.knows_table
            self._interval_ms = max(self._config.report_interval_ms, reply.interval_ms)
            if reply.plan is not None:
                self._deliver(reply.plan)

    def _exchange(self, report: SurvivalReport) -> PlanReply | None:
        """The scheduler's answer, or None: it is dead, frozen, or being started again."""
        try:
            if self._scheduler is None:
                self._scheduler = find_or_start_scheduler(self._app_name, self._config, self._group)
                ray.get(self._scheduler.configure.remote(self._config), timeout=RESOLVE_TIMEOUT_S)
            reply: Any = ray.get(self._scheduler.report.remote(report), timeout=REPLY_TIMEOUT_S)
        except Exception as error:  # of whatever kind: the scheduler's troubles are not the replica's
            self._scheduler = None
            self._table_is_known = False
            if not self._is_cut_off:
                logger.warning("no central scheduler, planning alone: %s", _first_line(error))
            self._is_cut_off = True
            self._closed.wait(self._config.report_interval_ms / 1e3)
            return None
        if self._is_cut_off:
            logger.info("the central scheduler answers again")
        self._is_cut_off = False
        assert isinstance(reply, PlanReply)
        return reply


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
