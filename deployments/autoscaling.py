"""The autoscaling policy of the server deployment: `dspark_ray.scheduling.autoscale` behind Serve's API.

Runs in Serve's controller about ten times a second, so it never waits. Demand comes from
`LLMServer.record_autoscaling_stats`. Serve drains a replica before it ends it. With `dry_run` nothing is
changed; the controller's log has a line for every number that would have been wanted.
"""

import logging
from dataclasses import asdict
from typing import Any

from ray.serve.config import AutoscalingContext

from dspark_ray.core.clock import Clock, SystemClock
from dspark_ray.scheduling.autoscale import (
    AutoscaleDecision,
    AutoscaleSettings,
    AutoscaleState,
    ReplicaDemand,
    decide,
)

logger = logging.getLogger("ray.serve")  # the controller's own: its file is where operators look

_STATE = "dspark"


class GoodputAutoscaler:
    """A class policy: Serve makes one with the keys of `serving.autoscaling`."""

    def __init__(
        self,
        *,
        min_replicas: int,
        max_replicas: int,
        target_utilization: float,
        queue_time_s: float,
        down_after_s: float,
        dry_run: bool,
        **others: Any,
    ) -> None:
        """`others` are for the replicas."""
        self._settings = AutoscaleSettings(
            min_replicas, max_replicas, target_utilization, queue_time_s, down_after_s
        )
        self._dry_run = dry_run
        # Not Serve's `current_time`, the machine's date: set back by an hour, it would put off every removal
        # by as much; set forward, it would remove at once.
        self._clock: Clock = SystemClock()
        self._said: int | None = None

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        state = AutoscaleState(**ctx.policy_state.get(_STATE, {}))
        decision = decide(
            replica_demands(ctx),
            ctx.total_queued_requests or 0.0,
            ctx.target_num_replicas,
            self._settings,
            state,
            self._clock.now_ms() / 1e3,
        )
        self._say(ctx, decision)
        wanted = ctx.target_num_replicas if self._dry_run else decision.num_replicas
        return wanted, {_STATE: asdict(decision.state)}

    def _say(self, ctx: AutoscalingContext, decision: AutoscaleDecision) -> None:
        """A line for each new number."""
        if decision.num_replicas in (self._said, ctx.target_num_replicas):
            self._said = decision.num_replicas
            return
        self._said = decision.num_replicas
        verb = "would go" if self._dry_run else "goes"
        logger.info(
            "autoscaling of %s %s from %d to %d replicas: %s",
            ctx.deployment_name,
            verb,
            ctx.target_num_replicas,
            decision.num_replicas,
            decision.reason,
        )


def replica_demands(ctx: AutoscalingContext) -> list[ReplicaDemand]:
    """The newest figures of the replicas that report all of them."""
    metrics = ctx.aggregated_metrics or {}
    names = list(ReplicaDemand.__slots__)
    running = ctx.running_replicas or []
    whole = [one for one in running if all(one in metrics.get(name, {}) for name in names)]
    return [ReplicaDemand(**{name: metrics[name][one] for name in names}) for one in whole]
