"""The split against trying every combination."""

import itertools

import numpy as np
import pytest

from dspark_ray.scheduling.knapsack import Options, concave, grid_cells, pareto, split, split_concave


def brute_force(groups: list[Options], capacity: float) -> float:
    best = -np.inf
    for combination in itertools.product(*(range(len(g.usage)) for g in groups)):
        used = sum(g.usage[k] for g, k in zip(groups, combination, strict=True))
        if used <= capacity + 1e-9:
            best = max(best, sum(g.value[k] for g, k in zip(groups, combination, strict=True)))
    return best


def random_group(rng: np.random.Generator) -> Options:
    size = int(rng.integers(1, 9))
    usage = np.concatenate(([0.0], rng.random(size) * 100))
    return pareto(usage, rng.random(size + 1) * 500)


def test_split_is_feasible_and_within_the_stated_bound_of_the_optimum():
    rng = np.random.default_rng(0)
    for _ in range(60):
        groups = [random_group(rng) for _ in range(int(rng.integers(1, 5)))]
        capacity = float(rng.random() * 200)
        chosen = split(groups, capacity)
        used = sum(g.usage[k] for g, k in zip(groups, chosen, strict=True))
        value = sum(g.value[k] for g, k in zip(groups, chosen, strict=True))
        smaller = capacity * (1 - len(groups) / grid_cells(len(groups)))
        assert used <= capacity + 1e-6
        assert brute_force(groups, smaller) - 1e-9 <= value <= brute_force(groups, capacity) + 1e-9


def test_an_option_that_fits_exactly_is_taken():
    group = Options(np.array([0.0, 25.0]), np.array([1.0, 2.0]))
    assert split([group] * 4, 100.0) == [1, 1, 1, 1]
    assert sorted(split([group] * 4, 99.0)) == [0, 1, 1, 1]


@pytest.mark.parametrize("capacity", [0.0, -1.0, 1e-9])
def test_no_capacity_leaves_the_free_options(capacity):
    group = Options(np.array([0.0, 5.0]), np.array([1.0, 2.0]))
    assert split([group, group], capacity) == [0, 0]


def test_no_groups():
    assert split([], 10.0) == []


def test_pareto_keeps_what_no_cheaper_option_beats():
    options = pareto(np.array([0.0, 4.0, 2.0, 2.0, 3.0]), np.array([1.0, 5.0, 2.0, 3.0, 3.0]))
    assert options.usage.tolist() == [0.0, 2.0, 4.0]
    assert options.value.tolist() == [1.0, 3.0, 5.0]
    assert options.value_at(3.0) == 4.0
    assert options.value_at(9.0) == 5.0


def test_many_groups_stay_fast_enough_and_feasible():
    rng = np.random.default_rng(2)
    groups = [random_group(rng) for _ in range(100)]
    chosen = split(groups, 500.0)
    assert sum(g.usage[k] for g, k in zip(groups, chosen, strict=True)) <= 500.0 + 1e-6


def test_a_hull_is_concave_above_its_curve_and_keeps_its_ends():
    rng = np.random.default_rng(2)
    for _ in range(100):
        group = random_group(rng)
        hull = concave(group, max_points=99)
        slopes = np.diff(hull.value) / np.diff(hull.usage)
        assert (np.diff(slopes) < 0).all()
        assert (hull.usage[0], hull.usage[-1]) == (group.usage[0], group.usage[-1])
        over = np.interp(group.usage, hull.usage, hull.value)
        assert (over >= group.value - 1e-9).all()
        assert np.isin(hull.usage, group.usage).all()
    curve = Options(np.arange(100.0), np.sqrt(np.arange(100.0)))
    assert len(concave(curve, 33).usage) == 33


def test_many_groups_are_split_within_a_segment_of_the_optimum():
    rng = np.random.default_rng(3)
    for _ in range(30):
        hulls = [concave(random_group(rng), 99) for _ in range(4)]
        capacity = float(rng.random() * sum(hull.usage[-1] for hull in hulls))
        chosen = split_concave(hulls, capacity)
        assert sum(hull.usage[k] for hull, k in zip(hulls, chosen, strict=True)) <= capacity + 1e-9
        worth = sum(hull.value[k] for hull, k in zip(hulls, chosen, strict=True))
        gap = max((np.diff(hull.value).max() for hull in hulls if len(hull.usage) > 1), default=0.0)
        assert worth >= brute_force(hulls, capacity) - gap
