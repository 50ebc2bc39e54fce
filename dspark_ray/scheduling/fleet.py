"""What replicas share, planned centrally. One policy a class, chosen by `scheduler.policy`.

Total throughput Σ_i τ_i·SPS_i(B_i) separates by replica, so a central plan equals each replica planning
alone unless something couples them. A plan therefore carries only what couples, never a budget: each
replica recomputes its budget every step, under its plan, from its own scores.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from dspark_ray.core.registry import Registry
from dspark_ray.core.types import FleetView, StepPlan, SurvivalReport
from dspark_ray.scheduling.knapsack import Options, pareto, split
from dspark_ray.scheduling.step_table import StepTable, cost_curve
from dspark_ray.scheduling.survival import rank_tokens

EVEN_SPLIT_TOLERANCE = 0.01  # an uneven split must bring this much more than one by demand


class FleetPolicy(Protocol):
    """Called by the scheduler actor a few times a second, on one thread; must not block."""

    def plan(self, view: FleetView, tables: Mapping[str, StepTable]) -> tuple[StepPlan, ...]:
        """One plan per report, in their order. `tables` is `view.tables`: digest → table.

        Must not fail for an unknown table or an empty view. `sequence` is that of the report that the plan
        answers and `ttl_ms` the default: the actor numbers and dates plans as it sends them.
        """
        ...


FLEET_POLICIES: Registry[type[FleetPolicy]] = Registry("fleet policy")


@FLEET_POLICIES.register("local")
class LocalPolicy:
    """Nothing couples: every replica plans alone."""

    def plan(self, view: FleetView, tables: Mapping[str, StepTable]) -> tuple[StepPlan, ...]:
        return tuple(_plan(report, "local", None) for report in view.reports)


@FLEET_POLICIES.register("shared_cap")
class SharedCapPolicy:
    """A fleet-wide rate of draft tokens, split where it brings most.

    For replica i verifying B draft tokens a step: throughput V_i(B) = τ_i(B)·SPS_i(B) in tokens/s and
    usage U_i(B) = B·SPS_i(B) in draft tokens/s, over the whole table. Which B each replica should run at
    is a multiple-choice knapsack (`knapsack.split`); what is left of the cap after it is shared out by
    unmet demand, so that shares sum to the cap. A split by demand alone is preferred when it brings as
    much to within `EVEN_SPLIT_TOLERANCE`: shares then follow the cap smoothly, and equal replicas stay
    equal.
    A replica whose table is unknown gets an equal part of the cap until its table arrives.
    """

    def plan(self, view: FleetView, tables: Mapping[str, StepTable]) -> tuple[StepPlan, ...]:
        cap = view.cap_draft_tokens_per_s
        if cap is None:
            return tuple(_plan(report, "shared_cap", None) for report in view.reports)
        shares = dict.fromkeys(range(len(view.reports)), cap / max(len(view.reports), 1))
        known = [i for i, report in enumerate(view.reports) if report.table_digest in tables]
        curves = [rate_options(view.reports[i], tables[view.reports[i].table_digest]) for i in known]
        shares.update(zip(known, share_cap(curves, sum(shares[i] for i in known)), strict=True))
        return tuple(_plan(report, "shared_cap", shares[i]) for i, report in enumerate(view.reports))


def rate_options(report: SurvivalReport, table: StepTable) -> Options:
    """(U_i(B), V_i(B)) for B = 0..R·γ of one replica, in tokens per second, reduced to what may be best."""
    num_decoding, block = report.survival.shape
    ranked, _ = rank_tokens(report.survival, np.full(num_decoding, block, dtype=np.int64))
    cost_ms = cost_curve(
        table,
        None,
        base_rows=max(report.base_rows, num_decoding),
        max_draft_tokens=len(ranked),
        num_drafting=num_decoding,
    )
    steps_per_s = 1e3 / cost_ms
    emitted = num_decoding + np.concatenate(([0.0], np.cumsum(ranked)))
    return pareto(np.arange(len(ranked) + 1) * steps_per_s, emitted * steps_per_s)


def share_cap(curves: Sequence[Options], cap: float) -> list[float]:
    """`cap` split over the replicas; Σ shares = cap. curves: one per replica"""
    if not curves:
        return []
    demand = np.array([curve.usage[-1] for curve in curves])  # of the option that is best without any cap
    total = float(demand.sum())
    by_demand = cap * (demand / total if total > 0 else np.full(len(curves), 1.0 / len(curves)))
    if total <= cap:
        return [float(share) for share in by_demand]
    used = np.array([curve.usage[k] for curve, k in zip(curves, split(curves, cap), strict=True)])
    unmet = demand - used
    by_value = used + (cap - float(used.sum())) * unmet / unmet.sum()
    if _value(curves, by_demand) >= (1.0 - EVEN_SPLIT_TOLERANCE) * _value(curves, by_value):
        return [float(share) for share in by_demand]
    return [float(share) for share in by_value]


def _value(curves: Sequence[Options], shares: Sequence[float] | np.ndarray) -> float:
    return sum(curve.value_at(float(share)) for curve, share in zip(curves, shares, strict=True))


def _plan(report: SurvivalReport, policy: str, draft_tokens_per_s: float | None) -> StepPlan:
    return StepPlan(report.replica_id, report.generation, report.sequence, policy, draft_tokens_per_s)
