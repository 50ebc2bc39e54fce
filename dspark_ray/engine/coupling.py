"""The engine's side of central scheduling: what the newest plan does to the budget, and its expiry.

A plan that is older than its time to live is ignored, so a replica whose scheduler died plans alone.
"""

from dspark_ray.core.clock import Clock
from dspark_ray.core.types import StepPlan
from dspark_ray.engine.budget import BudgetPlanner
from dspark_ray.scheduling.newest_plan import NewestPlan


class Coupling:
    """Owned by the step loop; plans arrive through its inbox."""

    def __init__(self, budget: BudgetPlanner, clock: Clock) -> None:
        self._budget = budget
        self._clock = clock
        self._newest = NewestPlan()
        self.base_rows = 0  # anchors of the last step

    def apply(self, plan: StepPlan) -> None:
        """Takes a plan; one that is older than the newest is dropped."""
        if self._newest.offer(plan, self._clock.now_ms()):
            self._budget.couple(plan)

    def expire(self) -> None:
        """Called at every step: a plan past its time stops coupling."""
        if self._newest.at(self._clock.now_ms()) is None:
            self._budget.uncouple()

    def plan_age_ms(self) -> float | None:
        """Age of the live plan; None without one."""
        self.expire()
        return self._newest.age_ms(self._clock.now_ms())
