"""Step times of a group: the worked example, brute force over all lengths, and what a member may verify."""

import itertools

import numpy as np
import pytest

from dspark_ray.core.types import FleetView, SurvivalReport
from dspark_ray.scheduling.fleet import FLEET_POLICIES
from dspark_ray.scheduling.lockstep import Member, best_step_ms, within_step
from dspark_ray.scheduling.step_table import StepTable
from dspark_ray.scheduling.survival import survival

# 7 ms up to six rows, then 11 ms.
STAIRS = StepTable(rows=[1, 6, 7, 40], verify_ms=[7.0, 7.0, 11.0, 11.0], staircase_rows=40)


def report(name: str, scores: np.ndarray, table: StepTable) -> SurvivalReport:
    num = len(scores)
    return SurvivalReport(name, 1, 1, scores.astype(np.float32), num, num, 0, table.digest, None, 0.0)


def member(scores: np.ndarray, table: StepTable) -> Member:
    ranked = np.sort(scores.ravel())[::-1]
    rows = len(scores) + np.arange(len(ranked) + 1)
    return Member(len(scores) + np.concatenate(([0.0], np.cumsum(ranked))), table.verify_cost_ms(rows))


def test_the_worked_example():
    """Two members with four requests each, one token drafted: .7 likely here, hopeless there.

    Pooled on one table, four tokens are two a member, 7 ms: 1543 tokens/s. All four are the first
    member's, whose step takes 11 ms: 982. Two of them keep to 7 ms: 1343.
    """
    likely, hopeless = (member(np.full((4, 1), a), STAIRS) for a in (0.7, 0.0))
    assert best_step_ms([likely, hopeless]) == 7.0

    def rate(first: int, second: int) -> float:
        step_ms = max(likely.cost_ms[first], hopeless.cost_ms[second])
        return 1e3 * (likely.tokens[first] + hopeless.tokens[second]) / step_ms

    pooled = np.sort(np.repeat([0.7, 0.0], 4))[::-1]
    believed = [1e3 * (8 + pooled[:n].sum()) / STAIRS.verify_cost_ms(4 + -(-n // 2)) for n in range(9)]
    assert round(max(believed)) == 1543
    assert int(np.argmax(believed)) == 4
    assert round(rate(4, 0)) == 982
    best = max(rate(first, second) for first, second in itertools.product(range(5), repeat=2))
    assert round(best) == 1343
    _, tokens = within_step(likely.cost_ms, 7.0)
    assert tokens == 2
    assert rate(tokens, tokens) == pytest.approx(best)


def test_the_step_time_is_worth_what_brute_force_finds():
    rng = np.random.default_rng(7)
    for _ in range(40):
        members = []
        for _ in range(int(rng.integers(1, 4))):
            scores = survival(rng.random((int(rng.integers(1, 4)), 3)) ** 0.4)
            cost_ms = 5.0 + np.cumsum(rng.choice([0.0, 0.3, 4.0], size=scores.size + 1))
            tokens = len(scores) + np.concatenate(([0.0], np.cumsum(np.sort(scores.ravel())[::-1])))
            members.append(Member(tokens, cost_ms))
        best = max(
            sum(one.tokens[b] for one, b in zip(members, budgets, strict=True))
            / max(one.cost_ms[b] for one, b in zip(members, budgets, strict=True))
            for budgets in itertools.product(*(range(len(one.tokens)) for one in members))
        )
        step_ms = best_step_ms(members)
        assert step_ms is not None
        found = [within_step(one.cost_ms, step_ms)[1] for one in members]
        tokens = sum(float(one.tokens[b]) for one, b in zip(members, found, strict=True))
        assert max(float(one.cost_ms[b]) for one, b in zip(members, found, strict=True)) <= step_ms
        assert tokens / step_ms == pytest.approx(best)


def test_tokens_up_to_the_groups_step_are_free_and_none_beyond_it():
    cost_ms, tokens = within_step(np.array([5.0, 6.0, 9.0, 12.0]), 9.0)
    assert tokens == 2
    assert cost_ms.tolist() == [9.0, 9.0, 9.0, 12.0]
    assert within_step(np.array([10.0, 11.0]), 9.0)[1] == 0


def test_every_member_gets_the_step_time_of_those_that_work():
    busy = report("a", np.full((4, 1), 0.7), STAIRS)
    idle = report("b", np.zeros((0, 1)), STAIRS)
    unknown = report("c", np.full((4, 1), 0.7), StepTable(rows=[1], verify_ms=[99.0]))
    tables = {STAIRS.digest: STAIRS}
    plans = FLEET_POLICIES.get("lockstep")().plan(FleetView((busy, idle, unknown), dict(tables)), tables)
    assert [plan.group_step_ms for plan in plans] == [7.0] * 3  # 5.4 / 7 > 6.8 / 11
    [plan] = FLEET_POLICIES.get("lockstep")().plan(FleetView((idle,), dict(tables)), tables)
    assert plan.group_step_ms is None
