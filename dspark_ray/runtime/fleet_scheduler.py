"""What the scheduler actor knows and decides, without Ray: reports in, plans out, one cap to set."""

import logging
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

from dspark_ray.core.clock import Clock
from dspark_ray.core.config import SchedulerConfig
from dspark_ray.core.errors import ArtefactError, ConfigError
from dspark_ray.core.types import FleetView, StepPlan, SurvivalReport
from dspark_ray.scheduling.fleet import FLEET_POLICIES
from dspark_ray.scheduling.groups import GroupDemand
from dspark_ray.scheduling.step_table import StepTable

logger = logging.getLogger(__name__)

MAX_TABLES = 64
REPORT_COST_MS = (
    2.0  # of the scheduler's time set aside for a report: its call, its curve, and the rest beside
)
LIVE_INTERVALS = 3.0  # without a report after which a replica is gone, if that is longer than a plan lives
REST = 4.0  # a round that took t ms is followed by no other for REST·t: planning never takes all the time


@dataclass(frozen=True, slots=True)
class PlanReply:
    """The answer to a report."""

    plan: StepPlan | None  # None: the report was stale
    knows_table: bool  # False: the next report must carry its step table
    interval_ms: float = 0.0  # until the next report, at least


@dataclass(slots=True)
class _Member:
    """A replica as last heard."""

    report: SurvivalReport
    arrived_ms: float


class FleetScheduler:
    """Full state per replica, the last report wins; a replica that falls silent leaves the view.

    Not thread-safe. Every call returns within one planning round. A report starts a round unless the last one
    was so long that rounds would take all the time; then it is answered from that one. In a fleet too large
    to report every `report_interval_ms`, replicas report less often, and plans are `pushed` to all of them.
    """

    def __init__(self, app_name: str, config: SchedulerConfig, clock: Clock) -> None:
        self._app_name = app_name
        self._clock = clock
        self._members: dict[str, _Member] = {}
        self._tables: OrderedDict[str, StepTable] = OrderedDict()  # the least recently used first
        self._num_rounds = 0
        self._round: dict[str, StepPlan] = {}  # the newest plans, by replica
        self._round_due_ms: float | None = None  # None: at once
        self._set_config(config)

    def configure(self, config: SchedulerConfig) -> None:
        """The application's configuration; a new one replaces what `set_cap` had set, the same does not."""
        if config != self._config:
            self._set_config(config)

    @property
    def interval_ms(self) -> float:
        """Between two reports of a replica: as configured, or as long as so many replicas need."""
        return max(self._config.report_interval_ms, REPORT_COST_MS * len(self._members))

    @property
    def pushes(self) -> bool:
        """Whether plans go to all replicas at once instead of answering reports."""
        return self.interval_ms > self._config.report_interval_ms

    def pushed(self) -> list[tuple[str, StepPlan]]:
        """A round of plans and where to send them; empty while the fleet is small."""
        if not self.pushes:
            return []
        self._round = {plan.replica_id: plan for plan in self.plans()}
        addresses = {name: member.report.plan_address for name, member in self._members.items()}
        return [(addresses[name], plan) for name, plan in self._round.items() if addresses[name]]

    def report(self, report: SurvivalReport) -> PlanReply:
        """Takes a report and plans the fleet with it; the plan for its replica."""
        member = self._members.get(report.replica_id)
        if member is not None and _age(report) <= _age(member.report):
            return PlanReply(None, knows_table=report.table_digest in self._tables)
        self._learn_table(report)
        self._members[report.replica_id] = _Member(replace(report, table=None), self._clock.now_ms())
        now_ms = self._clock.now_ms()
        if not self.pushes and (self._round_due_ms is None or now_ms >= self._round_due_ms):
            self._round = {plan.replica_id: plan for plan in self.plans()}
            ended_ms = self._clock.now_ms()
            self._round_due_ms = ended_ms + REST * (ended_ms - now_ms)
        plan = self._round.get(
            report.replica_id
        )  # None: new since the last round, it plans alone till the next
        if plan is not None:
            plan = replace(plan, generation=report.generation, sequence=report.sequence)
        return PlanReply(
            plan,
            knows_table=not report.table_digest or report.table_digest in self._tables,
            interval_ms=self.interval_ms,
        )

    def plans(self) -> tuple[StepPlan, ...]:
        """One planning round over the live replicas; each plan answers its replica's last report."""
        self._forget_silent()
        self._num_rounds += 1
        plans = self._policy.plan(self._view(), self._tables)
        return tuple(replace(plan, ttl_ms=self._config.plan_ttl_ms) for plan in plans)

    def _forget_silent(self) -> None:
        horizon_ms = self._clock.now_ms() - max(
            self._config.plan_ttl_ms, LIVE_INTERVALS * self.interval_ms if self.pushes else 0.0
        )
        self._members = {k: m for k, m in self._members.items() if m.arrived_ms >= horizon_ms}

    def _view(self) -> FleetView:
        reports = tuple(self._members[replica_id].report for replica_id in sorted(self._members))
        return FleetView(
            reports, dict(self._tables), self._cap, self._config.tier_terms(), self._config.target_boost
        )

    def remove(self, replica_id: str) -> None:
        """The replica is shutting down: its share goes to the others at once."""
        self._members.pop(replica_id, None)
        self._round_due_ms = None

    def demand(self) -> GroupDemand | None:
        """What the live replicas together would do with a cap; None if the policy splits none."""
        self._forget_silent()  # where nobody reports any more, no round does
        return self._policy.demand(self._view(), self._tables)

    def set_share(self, draft_tokens_per_s: float | None) -> None:
        """This group's part of the application's cap, from now on."""
        self._cap = draft_tokens_per_s

    def set_cap(self, draft_tokens_per_s: float | None) -> None:
        """The fleet-wide verify rate from now on; None takes the cap off. Raises `ConfigError`."""
        if not self._config.has_cap:
            policy = self._config.policy
            raise ConfigError(f"scheduler.policy is {policy!r}: 'shared_cap' and 'weighted' have a cap")
        if draft_tokens_per_s is not None and not 0 < draft_tokens_per_s < float("inf"):
            raise ConfigError(f"the cap must be a positive number of tokens/s, not {draft_tokens_per_s}")
        self._cap = draft_tokens_per_s
        self._round_due_ms = None

    def state(self) -> dict[str, Any]:
        """For humans: who is there and what they were told."""
        now_ms = self._clock.now_ms()
        plans = {plan.replica_id: plan for plan in self.plans()}
        replicas = {
            replica_id: {
                "report_age_ms": round(now_ms - member.arrived_ms, 1),
                "generation": member.report.generation,
                "num_running": member.report.num_running,
                "num_waiting": member.report.num_waiting,
                "budget_tokens": round(member.report.budget_tokens, 2),
                "draft_tokens_per_s": plans[replica_id].draft_tokens_per_s,
                "group_step_ms": plans[replica_id].group_step_ms,
                "table": member.report.table_digest,
            }
            for replica_id, member in sorted(self._members.items())
        }
        return {
            "application": self._app_name,
            "policy": self._config.policy,
            "cap_draft_tokens_per_s": self._cap,
            "planning_rounds": self._num_rounds,
            "replicas": replicas,
        }

    def _set_config(self, config: SchedulerConfig) -> None:
        self._config = config
        self._policy = FLEET_POLICIES.get(config.policy)()
        cap = config.cap_draft_tokens_per_s
        self._cap = None if cap is None else cap / config.num_groups
        self._round_due_ms = None

    def _learn_table(self, report: SurvivalReport) -> None:
        if report.table is not None and report.table_digest not in self._tables:
            try:
                self._tables[report.table_digest] = StepTable.from_dict(report.table)
            except ArtefactError as error:
                logger.error("replica %s sent no step table: %s", report.replica_id, error)
        if report.table_digest in self._tables:
            self._tables.move_to_end(report.table_digest)
        while len(self._tables) > MAX_TABLES:
            self._tables.popitem(last=False)


def _age(report: SurvivalReport) -> tuple[int, int]:
    """Orders the reports of one replica; a lower generation is a dead predecessor's."""
    return report.generation, report.sequence
