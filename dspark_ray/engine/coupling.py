"""The engine's side of central scheduling: the newest plan, its expiry, and what it does to the budget.

A plan that is older than its time to live is ignored, so a replica whose scheduler died plans alone.
"""

from dspark_ray.core.clock import Clock
from dspark_ray.core.types import StepPlan
from dspark_ray.engine.budget import BudgetPlanner
from dspark_ray.scheduling.cap import TokenBucket

_BURST_S = 0.25  # credit is kept for this long: several steps, and a cut of the cap is felt well within 1 s


class Coupling:
    """Owned by the step loop; plans arrive through its inbox."""

    def __init__(self, budget: BudgetPlanner, clock: Clock) -> None:
        self._budget = budget
        self._clock = clock
        self._plan: StepPlan | None = None
        self._arrived_ms = 0.0
        self.base_rows = 0  # rows of the last step that carried no draft token

    def apply(self, plan: StepPlan) -> None:
        """Takes a plan; one that is older than the newest is dropped."""
        newest = self._plan
        if newest is not None and (plan.generation, plan.sequence) < (newest.generation, newest.sequence):
            return
        self._plan, self._arrived_ms = plan, self._clock.now_ms()
        self._budget.group_step_ms = plan.group_step_ms
        self._budget.tiers, self._budget.target_boost = plan.tiers, plan.target_boost
        rate = plan.draft_tokens_per_s
        if rate is None:
            self._budget.bucket = None
        elif self._budget.bucket is None:
            self._budget.bucket = TokenBucket(rate, burst=self._burst(rate))
        else:
            self._budget.bucket.set_rate(rate, burst=self._burst(rate))

    def _burst(self, rate_per_s: float) -> float:
        """Most credit kept, in tokens: one request's block at least, or a slow rate never fills one."""
        return max(rate_per_s * _BURST_S, float(self._budget.num_draft_tokens))

    def expire(self) -> None:
        """Called at every step: a plan past its time stops coupling."""
        if self._plan is not None and self._clock.now_ms() - self._arrived_ms > self._plan.ttl_ms:
            self._plan = self._budget.bucket = self._budget.group_step_ms = None
            self._budget.tiers = ()

    def plan_age_ms(self) -> float | None:
        """Age of the live plan; None without one."""
        self.expire()
        return None if self._plan is None else self._clock.now_ms() - self._arrived_ms
