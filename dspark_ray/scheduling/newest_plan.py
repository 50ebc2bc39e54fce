"""The newest plan of the central scheduler, as long as it holds."""

from dspark_ray.core.types import StepPlan


class NewestPlan:
    """In order and in time: an older plan than the newest is dropped, one past its time is forgotten, and
    its replica then plans alone. Times are of the owner's clock. Not thread-safe.
    """

    def __init__(self) -> None:
        self._plan: StepPlan | None = None
        self._arrived_ms = 0.0

    def offer(self, plan: StepPlan, now_ms: float) -> bool:
        """Whether it is taken."""
        newest = self._plan
        if newest is not None and (plan.generation, plan.sequence) < (newest.generation, newest.sequence):
            return False
        self._plan, self._arrived_ms = plan, now_ms
        return True

    def at(self, now_ms: float) -> StepPlan | None:
        """The plan that holds at `now_ms`; None without one."""
        if self._plan is not None and now_ms - self._arrived_ms > self._plan.ttl_ms:
            self._plan = None
        return self._plan

    def age_ms(self, now_ms: float) -> float | None:
        """Since it arrived; None without a plan that holds."""
        return None if self.at(now_ms) is None else now_ms - self._arrived_ms
