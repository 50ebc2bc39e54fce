"""Sharing a cap: known answers, brute force over budgets, and shares that follow the cap."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from dspark_ray.core.types import FleetView, RowClaims, ServiceTier, SurvivalReport, TierTerms
from dspark_ray.scheduling import fleet
from dspark_ray.scheduling.fleet import FLEET_POLICIES, rate_options
from dspark_ray.scheduling.knapsack import share_cap
from dspark_ray.scheduling.step_table import StepTable
from dspark_ray.scheduling.survival import survival

# 10 ms up to four rows, then 12 ms.
STAIRS = StepTable(rows=[1, 4, 5, 40], verify_ms=[10.0, 10.0, 12.0, 12.0], staircase_rows=40)
SMOOTH = StepTable(rows=[1, 64], verify_ms=[10.0, 73.0], requests=[1, 8], draft_ms=[1.0, 2.0])
STEEP = StepTable(rows=[1, 64], verify_ms=[10.0, 199.0])
TABLES = {table.digest: table for table in (STAIRS, SMOOTH, STEEP)}


def report(name: str, scores: np.ndarray, table: StepTable) -> SurvivalReport:
    num = len(scores)
    return SurvivalReport(name, 1, 7, scores.astype(np.float32), num, num, 0, table.digest, None, 0.0)


def shares(reports: list[SurvivalReport], cap: float | None) -> list[float | None]:
    view = FleetView(tuple(reports), dict(TABLES), cap)
    return [plan.draft_tokens_per_s for plan in FLEET_POLICIES.get("shared_cap")().plan(view, TABLES)]


def throughputs(one: SurvivalReport) -> tuple[list[float], list[float]]:
    """U(B) and V(B) of a replica, written out."""
    table, ranked = TABLES[one.table_digest], sorted(one.survival.ravel(), reverse=True)
    num = len(one.survival)
    usage, value = [], []
    for budget in range(len(ranked) + 1):
        ms = table.verify_cost_ms(one.base_rows + budget) + table.draft_cost_ms(num)
        usage.append(budget * 1e3 / ms)
        value.append((num + sum(ranked[:budget])) * 1e3 / ms)
    return usage, value


def test_the_stairs_of_the_design_do_not_stall_the_split():
    """R = 4, a = .7: one token more loses (400 → 392 tok/s), four more gain (567)."""
    first = report("a", np.full((4, 1), 0.7), STAIRS)
    usage, value = throughputs(first)
    assert np.round(value[:2]).tolist() == [400, 392]
    assert round(value[4]) == 567
    [share] = shares([first], cap=usage[4])
    assert share == pytest.approx(usage[4])
    curve = rate_options(first, STAIRS)
    assert curve.value_at(share) == pytest.approx(value[4])


def test_two_replicas_on_stairs_share_unevenly_where_an_even_split_helps_neither():
    a, b = (report(name, np.full((4, 1), 0.7), STAIRS) for name in "ab")
    got = shares([a, b], cap=4 / 0.012)
    assert sorted(got) == pytest.approx([0.0, 4 / 0.012])


def test_survival_alone_is_the_wrong_key(monkeypatch):
    """One token to spare: .8 where SPS falls 100 → 60 buys 8 tok/s, .6 where it falls 100 → 99 buys 58."""
    dear = StepTable(rows=[1, 2], verify_ms=[10.0, 1000 / 60])
    cheap = StepTable(rows=[1, 2], verify_ms=[10.0, 1000 / 99])
    for table in (dear, cheap):
        monkeypatch.setitem(TABLES, table.digest, table)
    likely = report("a", np.array([[0.8]]), dear)
    unlikely = report("b", np.array([[0.6]]), cheap)
    assert rate_options(likely, dear).value.tolist() == pytest.approx([100, 108])
    assert rate_options(unlikely, cheap).value.tolist() == pytest.approx([100, 158.4])
    assert shares([likely, unlikely], cap=99.0) == pytest.approx([0.0, 99.0])


def random_report(rng: np.random.Generator, name: str) -> SurvivalReport:
    num = int(rng.integers(1, 4))
    table = list(TABLES.values())[int(rng.integers(len(TABLES)))]
    return report(name, survival(rng.random((num, 3)) ** 0.4), table)


def test_the_plan_is_worth_what_brute_force_finds():
    rng = np.random.default_rng(3)
    for _ in range(25):
        reports = [random_report(rng, name) for name in "abc"[: rng.integers(1, 4)]]
        curves = [throughputs(one) for one in reports]
        cap = float(rng.random() * sum(usage[-1] for usage, _ in curves))

        def best(capacity: float, curves=curves) -> float:
            found = 0.0
            for budgets in itertools.product(*(range(len(usage)) for usage, _ in curves)):
                if sum(u[b] for (u, _), b in zip(curves, budgets, strict=True)) <= capacity:
                    found = max(found, sum(v[b] for (_, v), b in zip(curves, budgets, strict=True)))
            return found

        planned = shares(reports, cap)
        options = [rate_options(one, TABLES[one.table_digest]) for one in reports]
        worth = sum(option.value_at(share) for option, share in zip(options, planned, strict=True))
        assert sum(planned) == pytest.approx(cap)
        # 1% for preferring a split by demand, N / 1024 of the cap for the grid.
        assert worth >= 0.99 * best(cap * (1 - len(reports) / 1024)) - 1e-6


def test_a_shared_cap_beats_an_even_split_by_what_brute_force_finds():
    """One replica on a shallow table with likely tokens, one on a steep table with unlikely ones."""
    fast = report("a", np.tile([0.9, 0.8, 0.7], (4, 1)), SMOOTH)
    slow = report("b", np.tile([0.5, 0.25, 0.1], (4, 1)), STEEP)
    curves = [throughputs(one) for one in (fast, slow)]
    cap = 0.6 * max(curves[0][0])

    def worth(split: list[float]) -> float:
        return sum(
            rate_options(one, TABLES[one.table_digest]).value_at(s)
            for one, s in zip((fast, slow), split, strict=True)
        )

    best = max(
        value[0][i] + value[1][j]
        for usage, value in [tuple(zip(*curves, strict=True))]
        for i, j in itertools.product(range(13), repeat=2)
        if usage[0][i] + usage[1][j] <= cap
    )
    planned = worth(shares([fast, slow], cap))
    assert planned >= 0.99 * best
    assert planned > 1.05 * worth([cap / 2, cap / 2])


def test_a_weighted_cap_is_worth_what_brute_force_finds():
    """Utility over all lengths of two replicas; the heavier tier's replica gets the larger share."""
    terms = tuple(TierTerms(tier, weight) for tier, weight in zip(ServiceTier, (0.25, 1.0, 4.0), strict=True))
    scores = np.array([[0.8, 0.6], [0.7, 0.3]])
    reports = []
    for name, tier in (("a", 2), ("b", 0)):
        claims = RowClaims(np.full(2, tier), np.zeros(2, dtype=np.float32))
        reports.append(replace(report(name, scores, SMOOTH), claims=claims))
    usage, value = throughputs(reports[0])
    cap = usage[3]
    view = FleetView(tuple(reports), dict(TABLES), cap, terms, 8.0)
    first, second = FLEET_POLICIES.get("weighted")().plan(view, TABLES)
    curve = rate_options(reports[0], SMOOTH)
    worth = 4.0 * curve.value_at(first.draft_tokens_per_s) + 0.25 * curve.value_at(second.draft_tokens_per_s)
    best = max(
        4.0 * value[i] + 0.25 * value[j]
        for i, j in itertools.product(range(5), repeat=2)
        if usage[i] + usage[j] <= cap * (1 - 2 / 1024)
    )
    assert worth >= 0.99 * best
    assert first.draft_tokens_per_s > 2 * second.draft_tokens_per_s


def test_halving_a_cap_that_binds_halves_the_shares():
    rng = np.random.default_rng(4)
    reports = [report(name, survival(rng.random((6, 7)) ** 0.3), SMOOTH) for name in "ab"]
    demand = sum(rate_options(one, SMOOTH).usage[-1] for one in reports)
    whole, half = shares(reports, 0.8 * demand), shares(reports, 0.4 * demand)
    np.testing.assert_allclose(half, np.array(whole) / 2, rtol=0.1)
    assert sum(half) == pytest.approx(0.4 * demand)


def test_equal_replicas_get_equal_shares_on_a_smooth_table():
    scores = survival(np.random.default_rng(5).random((4, 7)) ** 0.3)
    reports = [report(name, scores, SMOOTH) for name in "abcd"]
    assert shares(reports, 50.0) == pytest.approx([12.5] * 4)


def test_a_cap_that_does_not_bind_is_shared_by_demand():
    strong = report("a", np.full((4, 3), 0.9), SMOOTH)
    weak = report("b", np.full((4, 3), 0.01), STEEP)
    got = shares([strong, weak], 1e6)
    assert sum(got) == pytest.approx(1e6)
    assert got[1] == pytest.approx(0.0)


def test_a_replica_with_an_unknown_table_gets_an_equal_part():
    known = report("a", np.full((4, 3), 0.9), SMOOTH)
    unknown = report("b", np.full((4, 3), 0.9), StepTable(rows=[3], verify_ms=[1.0]))
    assert shares([known, unknown], 100.0) == pytest.approx([50.0, 50.0])


def test_idle_replicas_share_evenly_and_give_way_to_busy_ones():
    idle = [report(name, np.zeros((0, 7)), SMOOTH) for name in "ab"]
    assert shares(idle, 10.0) == pytest.approx([5.0, 5.0])
    busy = report("c", np.full((4, 3), 0.9), SMOOTH)
    assert shares([*idle, busy], 10.0) == pytest.approx([0.0, 0.0, 10.0])


def test_without_a_cap_nothing_couples():
    assert shares([report("a", np.full((4, 3), 0.9), SMOOTH)], None) == [None]


def test_no_replicas():
    assert share_cap([], 10.0) == []
    assert shares([], 10.0) == []


def test_many_replicas_share_the_cap_as_few_do():
    rng = np.random.default_rng(8)
    scores = [survival(rng.random((4, 7)) ** 0.3) for _ in range(4)]
    kinds = [report("x", one, table) for one, table in zip(scores, (SMOOTH, STEEP) * 2, strict=True)]
    few = shares(kinds, 100.0)
    many = shares([replace(kinds[n % 4], replica_id=f"{n:03}") for n in range(100)], 2500.0)
    assert sum(many) == pytest.approx(2500.0)
    worth = [
        sum(
            rate_options(kinds[n % 4], TABLES[kinds[n % 4].table_digest]).value_at(s)
            for n, s in enumerate(split)
        )
        for split in (few, many)
    ]
    assert worth[1] >= 0.98 * 25 * worth[0]


def test_a_curve_is_worked_out_once_a_report(monkeypatch):
    policy = FLEET_POLICIES.get("shared_cap")()
    seen: list[str] = []
    original = fleet.rate_options
    monkeypatch.setattr(
        fleet, "rate_options", lambda one, *rest: (seen.append(one.replica_id), original(one, *rest))[1]
    )
    first = report("a", np.full((2, 1), 0.5), SMOOTH)
    for reports in ((first,), (first,), (replace(first, sequence=8),)):
        policy.plan(FleetView(reports, dict(TABLES), 5.0), TABLES)
    assert seen == ["a", "a"]
