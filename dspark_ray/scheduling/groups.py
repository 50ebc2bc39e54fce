"""A cap over more replicas than one scheduler can plan: split over groups first, inside each group then.

A group is known to the outer split by one curve: the most that its replicas bring together with a given
share. For concave hulls that is their segments in order of steepness, laid end to end, and the two splits
together then do what one split over all replicas would (to the corners that thinning leaves out).
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dspark_ray.core.clock import Clock
from dspark_ray.scheduling.knapsack import Options, concave, share_cap

GROUP_POINTS = 129
SILENT_MS = 10_000.0  # after which a group counts no more


def group_of(replica_id: str, num_groups: int) -> int:
    """The group that a replica belongs to for as long as it lives; every process finds the same."""
    return zlib.crc32(replica_id.encode()) % num_groups


def group_curve(hulls: Sequence[Options], max_points: int = GROUP_POINTS) -> Options:
    """The best total value of several replicas by the usage that they share. hulls: concave, one a replica"""
    if not hulls:
        return Options(np.zeros(1), np.zeros(1))
    usage = np.concatenate([np.diff(hull.usage) for hull in hulls])
    value = np.concatenate([np.diff(hull.value) for hull in hulls])
    order = np.argsort(-value / usage, kind="stable")
    start = sum(float(hull.value[0]) for hull in hulls)
    return _thinned(
        np.concatenate(([0.0], np.cumsum(usage[order]))),
        start + np.concatenate(([0.0], np.cumsum(value[order]))),
        max_points,
    )


def _thinned(usage: np.ndarray, value: np.ndarray, max_points: int) -> Options:
    """By evenly spaced usage: a group's segments are many, and crowd where replicas resemble each other."""
    if len(usage) > max_points:
        wanted = np.linspace(0.0, usage[-1], max_points)
        places = np.unique(np.concatenate((np.searchsorted(usage, wanted[:-1]), [len(usage) - 1])))
        usage, value = usage[places], value[places]
    return concave(Options(usage, value), max_points)


@dataclass(frozen=True, slots=True)
class GroupDemand:
    """What the scheduler of one group tells the first one's."""

    num_replicas: int
    num_unknown: int  # whose step tables are not known yet
    curve: Options  # of the others together


def split_over_groups(demands: Mapping[int, GroupDemand], cap: float, num_groups: int) -> dict[int, float]:
    """The cap by group, of those that are known; as many equal parts are kept back as there are others.

    Replicas with unknown tables count for an equal part each, as within a group.
    """
    cap *= len(demands) / max(num_groups, len(demands))
    num_replicas = sum(one.num_replicas for one in demands.values())
    if not num_replicas:
        return {group: cap / len(demands) for group in demands}
    unknown = {group: cap * one.num_unknown / num_replicas for group, one in demands.items()}
    shares = share_cap([one.curve for one in demands.values()], cap - sum(unknown.values()))
    return {group: unknown[group] + share for group, share in zip(demands, shares, strict=True)}


class GroupShares:
    """The outer split, kept by the first group's scheduler. Groups ask now and then; who falls silent is
    forgotten, and until each has spoken once, or had the time to, its part is kept back."""

    def __init__(self, num_groups: int, cap: float | None, clock: Clock) -> None:
        self.cap = cap
        self._num_groups = num_groups
        self._clock = clock
        self._began_ms = clock.now_ms()
        self._demands: dict[int, tuple[float, GroupDemand]] = {}

    def share(self, group: int, demand: GroupDemand) -> float | None:
        """The group's part of the cap; None without a cap."""
        now_ms = self._clock.now_ms()
        self._demands[group] = now_ms, demand
        self._demands = {g: one for g, one in self._demands.items() if now_ms - one[0] <= SILENT_MS}
        if self.cap is None:
            return None
        known = {g: self._demands[g][1] for g in sorted(self._demands)}
        num_groups = self._num_groups if now_ms - self._began_ms <= SILENT_MS else len(known)
        return split_over_groups(known, self.cap, num_groups)[group]
