"""The engine's side of central scheduling: what the newest plan does to the budget, and its expiry.

A plan that is older than its time to live is ignored, so a replica whose scheduler died plans alone.
"""

from dspark_ray.core.clock import Clock
from dspark_ray.core.types import StepPlan
from dspark_ray.engine.budget import BudgetPlanner
from dspark_ray.scheduling.cap import bucket_of_share
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
        budget = self._budget
        if self._newest.offer(plan, self._clock.now_ms()):
            budget.group_step_ms = plan.group_step_ms
            budget.tiers, budget.target_boost = plan.tiers, plan.target_boost
            budget.bucket = bucket_of_share(budget.bucket, plan.draft_tokens_per_s, budget.num_draft_tokens)

    def expire(self) -> None:
        """Called at every step: a plan past its time stops coupling."""
        if self._newest.at(self._clock.now_ms()) is None:
            self._budget.bucket = self._budget.group_step_ms = None
            self._budget.tiers = ()

    def plan_age_ms(self) -> float | None:
        """Age of the live plan; None without one."""
        self.expire()
        return self._newest.age_ms(self._clock.now_ms())
