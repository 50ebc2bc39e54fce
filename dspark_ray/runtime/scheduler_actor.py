"""The central scheduler of an application as a Ray actor that may be wrong, may freeze and may die.

    handle = ray.get_actor(scheduler_name("dspark-ray"), namespace="serve")
    ray.get(handle.state.remote())
    ray.get(handle.set_cap.remote(2000.0))

Detached, so that it outlives any replica; started by whoever needs it first; it ends itself when its
application is gone from Serve. Replicas never wait for it.
"""

import contextlib
import logging
import os
import threading
import time
from typing import Any

import ray
import zmq
from ray.util import list_named_actors

from dspark_ray.core.clock import SystemClock
from dspark_ray.core.config import SchedulerConfig
from dspark_ray.core.errors import ConfigError
from dspark_ray.core.types import StepPlan, SurvivalReport
from dspark_ray.runtime.adapter_directory import AdapterDirectory
from dspark_ray.runtime.fleet_scheduler import FleetScheduler, PlanReply
from dspark_ray.runtime.logs import configure_logging
from dspark_ray.runtime.names import (
    NAMESPACE,
    engine_name,
    engine_prefix,
    scheduler_name,
    serve_replica_prefix,
)
from dspark_ray.runtime.plan_push import PlanPush
from dspark_ray.scheduling.groups import GroupDemand, GroupShares

logger = logging.getLogger(__name__)

WATCH_PERIOD_S = 2.0
SHARE_PERIOD_S = 1.0  # between two looks at how much of the cap a group needs
SHARE_TIMEOUT_S = 2.0
HURRY_S = 0.25  # between looks after a replica has left
HURRIED_LOOKS = 80
LOOKS_BEFORE_END = 3


class SchedulerActor:
    """`FleetScheduler` behind Ray calls, one at a time."""

    def __init__(self, app_name: str, config: SchedulerConfig, group: int = 0) -> None:
        configure_logging()
        self._app_name = app_name
        self._config = config
        self._group = group
        self._scheduler = FleetScheduler(app_name, config, SystemClock())
        self._lock = threading.Lock()  # around the scheduler: calls and pushes are two threads
        self._push = PlanPush(self._due_plans, zmq.Context(), SystemClock())
        self._push.start()
        self._shares = GroupShares(config.num_groups, config.cap_draft_tokens_per_s, SystemClock())
        threading.Thread(target=self._follow_groups, name="dspark-groups", daemon=True).start()
        self._leaving = threading.Event()
        threading.Thread(target=self._watch_application, name="dspark-watch", daemon=True).start()

    def configure(self, config: SchedulerConfig) -> None:
        """Called by every plan client when it finds this actor."""
        with self._lock:
            self._scheduler.configure(config)
            if config != self._config:
                self._shares = GroupShares(config.num_groups, config.cap_draft_tokens_per_s, SystemClock())
                self._config = config

    def report(self, report: SurvivalReport) -> PlanReply:
        with self._lock:
            return self._scheduler.report(report)

    def leave(self, replica_id: str) -> None:
        """A replica shuts down; perhaps the whole application does."""
        with self._lock:
            self._scheduler.remove(replica_id)
        self._leaving.set()

    def set_cap(self, draft_tokens_per_s: float | None) -> None:
        """Takes effect at once: plans are pushed, not left for the next reports.

        Raises `ConfigError` for a policy without a cap, or a cap that is none.
        """
        if self._group:
            raise ConfigError("the cap of an application is set at the scheduler of its first group")
        with self._lock:
            self._scheduler.set_cap(draft_tokens_per_s)
            self._shares.cap = draft_tokens_per_s
            if self._config.num_groups > 1:
                self._take_share()
            plans = () if self._scheduler.pushes else self._scheduler.plans()  # the next push is soon
        logger.info("cap of %s: %s draft tokens/s", self._app_name, draft_tokens_per_s)
        for plan in plans:
            with contextlib.suppress(ValueError):  # a replica that just died
                engine = ray.get_actor(engine_name(self._app_name, plan.replica_id), NAMESPACE)
                engine.apply_plan.remote(plan)

    def state(self) -> dict[str, Any]:
        with self._lock:
            state = self._scheduler.state()
        return {**state, "pushes": {"rounds": self._push.num_rounds, "total_ms": self._push.rounds_ms}}

    def group_share(self, group: int, demand: GroupDemand) -> float | None:
        """The first group's scheduler tells another one's what it may split."""
        with self._lock:
            return self._shares.share(group, demand)

    def _follow_groups(self) -> None:
        """Keeps this group's part of the cap up to date; without an answer it stays as it was."""
        while True:
            time.sleep(SHARE_PERIOD_S)
            if self._config.num_groups == 1:  # a later configuration may say otherwise
                continue
            try:
                if self._group == 0:
                    with self._lock:
                        self._take_share()
                else:
                    self._ask_for_share()
            except Exception as error:  # of whatever kind: the other scheduler's troubles are not this one's
                logger.info("group %d keeps its share of the cap: %s", self._group, error)

    def _take_share(self) -> None:
        demand = self._scheduler.demand()
        if demand is not None:
            self._scheduler.set_share(self._shares.share(0, demand))

    def _ask_for_share(self) -> None:
        with self._lock:
            demand = self._scheduler.demand()
        if demand is None:
            return
        first = find_or_start_scheduler(self._app_name, self._config)
        share: Any = ray.get(first.group_share.remote(self._group, demand), timeout=SHARE_TIMEOUT_S)
        with self._lock:
            self._scheduler.set_share(share)

    def _due_plans(self) -> list[tuple[str, StepPlan]]:
        with self._lock:
            return self._scheduler.pushed()

    def pid(self) -> int:
        """For those who test what its death costs."""
        return os.getpid()

    def _watch_application(self) -> None:
        """Ends this actor when nothing of its application is left; looks often once a replica has left."""
        num_missing, num_hurried = 0, 0
        while num_missing < LOOKS_BEFORE_END:
            if self._leaving.wait(HURRY_S if num_hurried else WATCH_PERIOD_S):
                self._leaving.clear()
                num_hurried = HURRIED_LOOKS
            num_hurried = max(0, num_hurried - 1)
            if _has_actors(self._app_name):
                num_missing = 0
            else:
                num_missing += 1
                num_hurried = max(num_hurried, LOOKS_BEFORE_END)
        logger.info("application %s is gone: its scheduler ends", self._app_name)
        AdapterDirectory(self._app_name).clear()
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def find_or_start_scheduler(app_name: str, config: SchedulerConfig, group: int = 0) -> Any:
    """The handle of the scheduler actor of one group of replicas, which may still be starting."""
    actor_class: Any = ray.remote(SchedulerActor)
    return actor_class.options(
        name=scheduler_name(app_name, group),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=0,
        num_cpus=0,
        # Whoever starts it is in a replica's placement group, which must not take it along.
        scheduling_strategy="DEFAULT",
    ).remote(app_name, config, group)


def _has_actors(app_name: str) -> bool:
    """Whether the application has a replica or an engine, by the names of actors.

    Serve is not asked: a call to a controller that is being shut down may never return.
    """
    prefixes = (engine_prefix(app_name), serve_replica_prefix(app_name))
    try:
        listed = list_named_actors(all_namespaces=True)
    except Exception as error:  # of whatever kind: without an answer nothing is known
        logger.info("cannot list actors: %s", error)
        return True
    return any(entry["name"].startswith(prefixes) for entry in listed)
