"""What a live plan couples in one step of vLLM, and what it leaves of vLLM's choice. Needs no vLLM.

The scheduler in vLLM's core makes the terms, once a step; they travel to all ranks with its schedule. Ranks
ask neither a clock nor a socket: two that chose different budgets would hang in the next collective.
"""

from dataclasses import dataclass

from dspark_ray.core.types import StepPlan
from dspark_ray.scheduling.cap import TokenBucket, bucket_of_share
from dspark_ray.scheduling.lockstep import within_step
from dspark_ray.scheduling.step_table import Float64Array


@dataclass(frozen=True, slots=True)
class StepTerms:
    """Of one step."""

    now_ms: float  # by the core's clock
    draft_tokens_per_s: float | None  # the replica's share of a shared cap; None: no cap
    group_step_ms: float | None  # when its group's step ends; None: no group

    @classmethod
    def of(cls, plan: StepPlan, now_ms: float) -> "StepTerms":
        return cls(now_ms, plan.draft_tokens_per_s, plan.group_step_ms)


@dataclass(frozen=True, slots=True)
class Limit:
    """Under which vLLM searches its budget."""

    cap_tokens: int | None = None  # most draft tokens; None: as many as there are
    least_step_ms: float = 0.0  # no step of the group is shorter


NO_LIMIT = Limit()


class RankBudget:
    """One rank's side: equal terms, costs and budgets give equal limits on all of them."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._bucket: TokenBucket | None = None

    def limit(self, terms: StepTerms | None, cost_ms: Float64Array) -> Limit:
        """For a step whose time with B = 0, 1, ... draft tokens is `cost_ms` [B + 1]; None: no live plan."""
        self._bucket = bucket_of_share(
            self._bucket, terms.draft_tokens_per_s if terms else None, self._block_size
        )
        if terms is None:
            return NO_LIMIT
        cap_tokens = None if self._bucket is None else self._bucket.available(terms.now_ms)
        if terms.group_step_ms is None:
            return Limit(cap_tokens)
        _, free_tokens = within_step(cost_ms, terms.group_step_ms)
        return Limit(free_tokens if cap_tokens is None else min(cap_tokens, free_tokens), terms.group_step_ms)

    def spend(self, num_tokens: int) -> None:
        """What vLLM chose under the limit."""
        if self._bucket is not None:
            self._bucket.take(num_tokens)
