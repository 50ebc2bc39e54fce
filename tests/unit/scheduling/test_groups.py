"""A cap split over groups and then inside them, against one split over all replicas and brute force."""

import itertools

import numpy as np
import pytest

from dspark_ray.core.clock import ManualClock
from dspark_ray.scheduling.groups import (
    GROUP_POINTS,
    SILENT_MS,
    GroupDemand,
    GroupShares,
    group_curve,
    group_of,
    split_over_groups,
)
from dspark_ray.scheduling.knapsack import Options, concave, pareto, share_cap


def random_hull(rng: np.random.Generator, size: int = 8) -> Options:
    usage = np.concatenate(([0.0], rng.random(size) * 100))
    return concave(pareto(usage, np.sqrt(usage) * rng.random(size + 1) * 50), 33)


def value(hulls: list[Options], shares: list[float]) -> float:
    return sum(hull.value_at(share) for hull, share in zip(hulls, shares, strict=True))


def two_level(groups: list[list[Options]], cap: float) -> tuple[float, float]:
    """What it brings, and what it uses."""
    demands = {g: GroupDemand(len(hulls), 0, group_curve(hulls)) for g, hulls in enumerate(groups)}
    shares = split_over_groups(demands, cap, len(groups))
    inside = [share_cap(hulls, shares[g]) for g, hulls in enumerate(groups)]
    return sum(value(*pair) for pair in zip(groups, inside, strict=True)), sum(map(sum, inside))


def brute_force(curves: list[Options], cap: float, cells: int) -> float:
    """The best of all splits of the cap on a grid, over three curves."""
    grid = np.linspace(0.0, cap, cells + 1)
    worth = [np.interp(grid, curve.usage, curve.value) for curve in curves]
    pairs = itertools.product(range(cells + 1), repeat=2)
    return max(worth[0][a] + worth[1][b] + worth[2][cells - a - b] for a, b in pairs if a + b <= cells)


@pytest.mark.parametrize("seed", range(6))
def test_small_fleets_against_brute_force(seed: int) -> None:
    """A group's curve against every split over its replicas, and the split over groups likewise."""
    rng = np.random.default_rng(seed)
    groups = [[random_hull(rng) for _ in range(3)] for _ in range(3)]
    curves = [group_curve(hulls) for hulls in groups]
    for hulls, curve in zip(groups, curves, strict=True):
        for share in (0.2, 0.6, 0.9):
            best = brute_force(hulls, share * curve.usage[-1], 60)
            assert curve.value_at(share * curve.usage[-1]) == pytest.approx(best, rel=0.01)
    demands = {group: GroupDemand(3, 0, curve) for group, curve in enumerate(curves)}
    for share in (0.2, 0.6, 0.9):
        cap = share * sum(curve.usage[-1] for curve in curves)
        shares = split_over_groups(demands, cap, 3)
        assert sum(shares.values()) == pytest.approx(cap)
        assert value(curves, list(shares.values())) >= 0.98 * brute_force(curves, cap, 60)


@pytest.mark.parametrize("num_groups", [3, 80])
def test_two_levels_bring_what_one_does(num_groups: int) -> None:
    rng = np.random.default_rng(num_groups)
    groups = [[random_hull(rng) for _ in range(70)] for _ in range(num_groups)]
    everyone = list(itertools.chain(*groups))
    for share in (0.1, 0.4, 0.8):
        cap = share * sum(hull.usage[-1] for hull in everyone)
        found, used = two_level(groups, cap)
        assert used == pytest.approx(cap)
        assert found >= 0.99 * value(everyone, share_cap(everyone, cap))


def test_a_groups_curve_is_the_best_of_its_replicas() -> None:
    rng = np.random.default_rng(1)
    hulls = [random_hull(rng) for _ in range(5)]
    curve = group_curve(hulls)
    assert curve.usage[-1] == pytest.approx(sum(hull.usage[-1] for hull in hulls))
    assert curve.value[-1] == pytest.approx(sum(hull.value[-1] for hull in hulls))
    for cap in np.linspace(0, curve.usage[-1], 7):
        assert curve.value_at(cap) >= value(hulls, share_cap(hulls, float(cap))) - 1e-6
    many = group_curve([random_hull(rng) for _ in range(300)])
    assert len(many.usage) <= GROUP_POINTS
    assert (np.diff(np.diff(many.value) / np.diff(many.usage)) <= 1e-9).all()
    assert len(group_curve([]).usage) == 1


def test_unknown_replicas_and_unheard_groups_keep_their_parts() -> None:
    hull = Options(np.array([0.0, 100.0]), np.array([1.0, 2.0]))
    known, unknown = GroupDemand(2, 0, group_curve([hull, hull])), GroupDemand(2, 2, group_curve([]))
    shares = split_over_groups({0: known, 1: unknown}, 80.0, 2)
    assert shares == pytest.approx({0: 40.0, 1: 40.0})
    assert split_over_groups({0: known}, 80.0, 4) == pytest.approx({0: 20.0})
    empty = GroupDemand(0, 0, group_curve([]))
    assert split_over_groups({0: empty, 1: empty}, 80.0, 2) == pytest.approx({0: 40.0, 1: 40.0})


def test_shares_follow_who_is_there() -> None:
    clock = ManualClock()
    shares = GroupShares(3, 90.0, clock)
    hull = Options(np.array([0.0, 100.0]), np.array([1.0, 2.0]))
    demand = GroupDemand(1, 0, group_curve([hull]))
    assert shares.share(0, demand) == pytest.approx(30.0)  # two have not spoken
    assert shares.share(1, demand) == pytest.approx(30.0)
    clock.advance(SILENT_MS + 1)
    assert shares.share(0, demand) == pytest.approx(90.0)
    assert shares.share(2, demand) == pytest.approx(45.0)
    assert shares.share(0, demand) == pytest.approx(45.0)
    shares.cap = None
    assert shares.share(0, demand) is None


def test_replicas_are_spread_evenly_and_stay() -> None:
    groups = [group_of(f"replica-{number}", 10) for number in range(5000)]
    assert groups[:50] == [group_of(f"replica-{number}", 10) for number in range(50)]
    counts = np.bincount(groups, minlength=10)
    assert counts.min() > 400
    assert counts.max() < 600
