"""One capacity split over groups of which each takes exactly one option: multiple-choice knapsack.

Solved exactly on a grid of the capacity, never one token at a time: behind a stair of the step table the
next token may lose throughput while the next four gain a lot.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]

EXACT_REPLICAS = 64  # beyond it a cap is split over concave hulls
EVEN_SPLIT_TOLERANCE = 0.01  # an uneven split must bring this much more than one by demand
_CELLS_AT_LEAST = 1024
_CELLS_PER_GROUP = 64
_CELLS_AT_MOST = 4096  # bounds time and memory; reached at 64 groups


@dataclass(frozen=True, slots=True)
class Options:
    """One group's choices on its Pareto frontier: each costs more than the one before and brings more."""

    usage: Float64Array  # [K] ascending, starts at 0
    value: Float64Array  # [K] ascending

    def value_at(self, usage: float) -> float:
        """What a share of `usage` brings when it is spent on the two neighbouring options in turn."""
        return float(np.interp(usage, self.usage, self.value))


def pareto(usage: Float64Array, value: Float64Array) -> Options:
    """The options that no cheaper or equally cheap one beats. usage [n] ≥ 0 with a 0 among them, value [n]"""
    assert usage.min() == 0, "no option costs less than nothing, and some option costs nothing"
    order = np.lexsort((-value, usage))
    sorted_value = value[order]
    best_before = np.concatenate(([-np.inf], np.maximum.accumulate(sorted_value)[:-1]))
    kept = order[sorted_value > best_before]
    return Options(usage[kept].astype(np.float64), value[kept].astype(np.float64))


def concave(options: Options, max_points: int) -> Options:
    """The upper concave hull, thinned to `max_points` of its corners; first and last stay."""
    usage, value = options.usage, options.value
    while len(usage) > 2:
        slope = np.diff(value) / np.diff(usage)
        kept = np.concatenate(
            ([True], slope[:-1] > slope[1:], [True])
        )  # else below a chord of its neighbours
        if kept.all():
            break
        usage, value = usage[kept], value[kept]
    if len(usage) > max_points:
        places = np.unique(np.linspace(0, len(usage) - 1, max_points).astype(np.int64))
        usage, value = usage[places], value[places]
    return Options(usage, value)


def split_concave(hulls: Sequence[Options], capacity: float) -> list[int]:
    """The corner of each hull with the greatest total value within `capacity`, by steepness. For many groups.

    Falls short of the best mix of corners by less than the value of one segment: the first that does not fit.
    """
    owners = np.repeat(np.arange(len(hulls)), [len(hull.usage) - 1 for hull in hulls])
    usage = np.concatenate([np.diff(hull.usage) for hull in hulls])
    slope = np.concatenate([np.diff(hull.value) for hull in hulls]) / usage
    order = np.argsort(-slope, kind="stable")
    fitting = int(np.searchsorted(np.cumsum(usage[order]), capacity, side="right"))
    return [int(n) for n in np.bincount(owners[order[:fitting]], minlength=len(hulls))]


def grid_cells(num_groups: int) -> int:
    """Cells that the capacity is cut into: 64 a group, within 1024 and 4096."""
    return min(max(_CELLS_AT_LEAST, _CELLS_PER_GROUP * num_groups), _CELLS_AT_MOST)


def split(groups: Sequence[Options], capacity: float) -> list[int]:
    """The option of each group with the greatest total value within `capacity`.

    Usage is rounded up to the grid, so that the result is always feasible and costs less than one cell a
    group too much: its value is at least the exact optimum of a capacity smaller by the share len(groups) /
    grid_cells(len(groups)) (at most 1/64 up to 64 groups), and at most that of the whole capacity. Ties
    favour the cheaper option.
    """
    cells = grid_cells(len(groups))
    places = np.arange(cells + 1)
    best = np.zeros(cells + 1)  # [cells + 1] greatest value of the groups so far within that many cells
    taken: list[NDArray[np.int64]] = []
    units_of: list[NDArray[np.int64]] = []
    for group in groups:
        units = _in_cells(group.usage, capacity, cells)
        left = places[None, :] - units[:, None]
        total = np.where(left >= 0, group.value[:, None] + best[np.maximum(left, 0)], -np.inf)
        choice = np.argmax(total, axis=0)
        best = total[choice, places]
        taken.append(choice)
        units_of.append(units)
    return _trace_back(taken, units_of, cells)


def _in_cells(usage: Float64Array, capacity: float, cells: int) -> NDArray[np.int64]:
    """Usage in whole cells, rounded up; what exceeds the capacity becomes one cell too many."""
    if capacity <= 0:
        return np.where(usage > 0, cells + 1, 0).astype(np.int64)
    exact = np.minimum(usage / capacity * cells, cells + 1.0)
    return np.ceil(exact - 1e-9).astype(np.int64)


def _trace_back(taken: list[NDArray[np.int64]], units_of: list[NDArray[np.int64]], cells: int) -> list[int]:
    chosen: list[int] = []
    place = cells
    for choice, units in zip(reversed(taken), reversed(units_of), strict=True):
        option = int(choice[place])
        chosen.append(option)
        place -= int(units[option])
    return chosen[::-1]


def share_cap(curves: Sequence[Options], cap: float) -> list[float]:
    """`cap` split over the replicas; Σ shares = cap. curves: one per replica"""
    if not curves:
        return []
    demand = np.array([curve.usage[-1] for curve in curves])  # of the option that is best without any cap
    total = float(demand.sum())
    by_demand = cap * (demand / total if total > 0 else np.full(len(curves), 1.0 / len(curves)))
    if total <= cap:
        return [float(share) for share in by_demand]
    are_hulls = len(curves) > EXACT_REPLICAS
    chosen = split_concave(curves, cap) if are_hulls else split(curves, cap)
    used = np.array([curve.usage[k] for curve, k in zip(curves, chosen, strict=True)])
    unmet = demand - used
    by_value = used + (cap - float(used.sum())) * unmet / unmet.sum()
    # Hulls have small segments and no steps to fall off: their split is smooth as it is.
    if not are_hulls and _value(curves, by_demand) >= (1.0 - EVEN_SPLIT_TOLERANCE) * _value(curves, by_value):
        return [float(share) for share in by_demand]
    return [float(share) for share in by_value]


def _value(curves: Sequence[Options], shares: Sequence[float] | np.ndarray) -> float:
    return sum(curve.value_at(float(share)) for curve, share in zip(curves, shares, strict=True))
