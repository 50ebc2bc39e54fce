"""Two schedulers of one application, each with its group of replicas, under one cap."""

from typing import Any

import numpy as np
import pytest
import ray

from dspark_ray.core.config import SchedulerConfig
from dspark_ray.core.errors import ConfigError
from dspark_ray.core.types import SurvivalReport
from dspark_ray.runtime.names import NAMESPACE, engine_name
from dspark_ray.runtime.scheduler_actor import find_or_start_scheduler
from dspark_ray.scheduling.step_table import StepTable
from tests.ray.conftest import eventually

APP = "grouped"
CONFIG = SchedulerConfig(policy="shared_cap", cap_draft_tokens_per_s=1000.0, num_groups=2)
TABLE = StepTable(np.array([1, 64]), np.array([5.0, 20.0]))
GROUPS = {"a": 0, "b": 0, "c": 0, "d": 1}


@ray.remote(num_cpus=0)
class Keeper:
    """Called like an engine: without one the schedulers would end."""


def report(name: str, sequence: int) -> SurvivalReport:
    survival = np.tile(np.array([0.8, 0.6, 0.4], np.float32), (16, 1))
    return SurvivalReport(name, 1, sequence, survival, 16, 16, 0, TABLE.digest, TABLE.to_dict(), 6.0)


def test_a_cap_is_split_over_groups_by_what_they_need(cluster: str) -> None:
    keeper = Keeper.options(name=engine_name(APP, "none"), namespace=NAMESPACE).remote()
    schedulers: list[Any] = [find_or_start_scheduler(APP, CONFIG, group) for group in range(2)]
    numbers = iter(range(1, 10_000))

    def shares() -> list[float | None]:
        """Of the four replicas; None for one that came after the last round of its scheduler."""
        sequence = next(numbers)
        replies = ray.get([schedulers[g].report.remote(report(name, sequence)) for name, g in GROUPS.items()])
        return [reply.plan and reply.plan.draft_tokens_per_s for reply in replies]

    try:
        eventually(lambda: _are(shares(), 250.0), period_s=0.2)
        ray.get(schedulers[0].set_cap.remote(400.0))
        eventually(lambda: _are(shares(), 100.0), period_s=0.2)
        with pytest.raises(ConfigError, match="first group"):
            ray.get(schedulers[1].set_cap.remote(5.0))
    finally:
        for actor in (keeper, *schedulers):
            ray.kill(actor)


def _are(shares: list[float | None], expected: float) -> bool:
    return all(share == pytest.approx(expected, rel=0.02) for share in shares)
