"""What replicas share, planned centrally. One policy a class, chosen by `scheduler.policy`.

Total throughput Σ_i τ_i·SPS_i(B_i) separates by replica, so a central plan equals each replica planning
alone unless something couples them. A plan therefore carries only what couples, never a budget: each
replica recomputes its budget every step, under its plan, from its own scores.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from dspark_ray.core.registry import Registry
from dspark_ray.core.types import SERVICE_TIERS, FleetView, ServiceTier, StepPlan, SurvivalReport
from dspark_ray.scheduling.groups import GroupDemand, group_curve
from dspark_ray.scheduling.knapsack import EXACT_REPLICAS, Options, concave, pareto, share_cap
from dspark_ray.scheduling.lockstep import Member, best_step_ms
from dspark_ray.scheduling.step_table import StepTable, cost_curve
from dspark_ray.scheduling.survival import rank_tokens
from dspark_ray.scheduling.utility import Claims, claims_of, utility_curve

HULL_POINTS = 33


class FleetPolicy(Protocol):
    """Called by the scheduler actor a few times a second, on one thread; must not block."""

    def plan(self, view: FleetView, tables: Mapping[str, StepTable]) -> tuple[StepPlan, ...]:
        """One plan per report, in their order. `tables` is `view.tables`: digest → table.

        Must not fail for an unknown table or an empty view. `sequence` is that of the report that the plan
        answers and `ttl_ms` the default: the actor numbers and dates plans as it sends them.
        """
        ...

    def demand(self, view: FleetView, tables: Mapping[str, StepTable]) -> GroupDemand | None:
        """What the view's replicas together would do with a cap; None if the policy splits none."""
        ...


FLEET_POLICIES: Registry[type[FleetPolicy]] = Registry("fleet policy")


@FLEET_POLICIES.register("local")
class LocalPolicy:
    """Nothing couples: every replica plans alone."""

    def plan(self, view: FleetView, tables: Mapping[str, StepTable]) -> tuple[StepPlan, ...]:
        return tuple(_plan(report, "local", None) for report in view.reports)

    def demand(self, view: FleetView, tables: Mapping[str, StepTable]) -> GroupDemand | None:
        return None


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
    Above 64 replicas their curves are replaced by concave hulls, which can be split in the time of a sort.
    """

    def __init__(self) -> None:
        self._curves = _Curves()

    def plan(self, view: FleetView, tables: Mapping[str, StepTable]) -> tuple[StepPlan, ...]:
        shares = self._curves.shares(view, tables)
        return tuple(_plan(one, "shared_cap", share) for one, share in zip(view.reports, shares, strict=True))

    def demand(self, view: FleetView, tables: Mapping[str, StepTable]) -> GroupDemand | None:
        return self._curves.demand(view, tables)


@FLEET_POLICIES.register("weighted")
class WeightedPolicy:
    """Tiers and speed targets: every plan carries their terms, and replicas maximise utility under them.

    A cap, if there is one, is split as `shared_cap` splits it, with utility (`utility.py`) in the place of
    throughput. Without a cap nothing couples replicas but the terms: each weighs its own requests.
    """

    def __init__(self) -> None:
        self._curves = _Curves()

    def plan(self, view: FleetView, tables: Mapping[str, StepTable]) -> tuple[StepPlan, ...]:
        plans = (
            _plan(one, "weighted", share)
            for one, share in zip(view.reports, self._curves.shares(view, tables), strict=True)
        )
        return tuple(replace(one, tiers=view.tiers, target_boost=view.target_boost) for one in plans)

    def demand(self, view: FleetView, tables: Mapping[str, StepTable]) -> GroupDemand | None:
        return self._curves.demand(view, tables)


@FLEET_POLICIES.register("lockstep")
class LockstepPolicy:
    """Replicas whose steps end together: the step time at which the group emits most (`lockstep.py`).

    A replica whose table is unknown has no say in it, and follows it.
    """

    def plan(self, view: FleetView, tables: Mapping[str, StepTable]) -> tuple[StepPlan, ...]:
        known = [one for one in view.reports if one.table_digest in tables]
        members = [_member(one, tables[one.table_digest]) for one in known if len(one.survival)]
        step_ms = best_step_ms(members)
        return tuple(replace(_plan(one, "lockstep", None), group_step_ms=step_ms) for one in view.reports)

    def demand(self, view: FleetView, tables: Mapping[str, StepTable]) -> GroupDemand | None:
        return None


def rate_options(report: SurvivalReport, table: StepTable, claims: Claims | None = None) -> Options:
    """(U_i(B), V_i(B)) for B = 0..R·γ of one replica, in tokens per second, reduced to what may be best.

    With claims, V is utility per second instead of throughput.
    """
    member = _member(report, table)
    if claims is None:
        budgets, per_ms = np.arange(len(member.cost_ms)), member.tokens / member.cost_ms
    else:
        num_decoding, block = report.survival.shape
        max_lens = np.full(num_decoding, block, dtype=np.int64)
        budgets, per_ms = utility_curve(report.survival, max_lens, claims, member.cost_ms)
    return pareto(budgets * 1e3 / member.cost_ms[budgets], per_ms * 1e3)


def _member(report: SurvivalReport, table: StepTable) -> Member:
    """τ_i(B) and T_i(B) for B = 0..R·γ."""
    num_decoding, block = report.survival.shape
    ranked, _ = rank_tokens(report.survival, np.full(num_decoding, block, dtype=np.int64))
    cost_ms = cost_curve(
        table,
        None,
        base_rows=max(report.base_rows, num_decoding),
        max_draft_tokens=len(ranked),
        num_drafting=num_decoding,
    )
    return Member(num_decoding + np.concatenate(([0.0], np.cumsum(ranked))), cost_ms)


def _claims(report: SurvivalReport, view: FleetView) -> Claims | None:
    num_decoding = len(report.survival)
    if report.claims is not None and len(report.claims.tiers) == num_decoding:
        return claims_of(report.claims.tiers, report.claims.targets_per_s, view.tiers, view.target_boost)
    tiers = np.full(num_decoding, SERVICE_TIERS.index(ServiceTier.DEFAULT))
    return claims_of(tiers, np.zeros(num_decoding, dtype=np.float32), view.tiers, view.target_boost)


class _Curves:
    """Each replica's options, worked out once a report: a round over many replicas is then cheap."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, Options, Options]] = {}  # replica → what it is of, curve, hull

    def shares(self, view: FleetView, tables: Mapping[str, StepTable]) -> list[float | None]:
        """The cap split over the reports, in their order; None for each without a cap."""
        reports, cap = view.reports, view.cap_draft_tokens_per_s
        if cap is None:
            return [None] * len(reports)
        shares = dict.fromkeys(range(len(reports)), cap / max(len(reports), 1))
        places = [i for i, report in enumerate(reports) if report.table_digest in tables]
        known = self._update([reports[i] for i in places], view, tables)
        curves = [curve if len(known) <= EXACT_REPLICAS else hull for _, curve, hull in known]
        shares.update(zip(places, share_cap(curves, sum(shares[i] for i in places)), strict=True))
        return [shares[i] for i in range(len(reports))]

    def demand(self, view: FleetView, tables: Mapping[str, StepTable]) -> GroupDemand:
        known = self._update([one for one in view.reports if one.table_digest in tables], view, tables)
        curve = group_curve([hull for _, _, hull in known])
        return GroupDemand(len(view.reports), len(view.reports) - len(known), curve)

    def _update(
        self, reports: Sequence[SurvivalReport], view: FleetView, tables: Mapping[str, StepTable]
    ) -> list[tuple[object, Options, Options]]:
        """What is known of those reports, in their order; the rest is forgotten."""
        self._known = {report.replica_id: self._of(report, view, tables) for report in reports}
        return [self._known[report.replica_id] for report in reports]

    def _of(
        self, report: SurvivalReport, view: FleetView, tables: Mapping[str, StepTable]
    ) -> tuple[object, Options, Options]:
        identity = (report.generation, report.sequence, report.table_digest, view.tiers, view.target_boost)
        found = self._known.get(report.replica_id)
        if found is not None and found[0] == identity:
            return found
        curve = rate_options(report, tables[report.table_digest], _claims(report, view))
        return identity, curve, concave(curve, HULL_POINTS)


def _plan(report: SurvivalReport, policy: str, draft_tokens_per_s: float | None) -> StepPlan:
    return StepPlan(report.replica_id, report.generation, report.sequence, policy, draft_tokens_per_s)
