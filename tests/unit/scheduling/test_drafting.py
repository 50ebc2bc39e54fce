"""Whether to draft at the present load, how many tokens, and what is tried meanwhile."""

from collections.abc import Sequence

import numpy as np
import pytest

from dspark_ray.scheduling.correction import ClaimCorrection
from dspark_ray.scheduling.drafting import Costs, Drafting, best_width
from dspark_ray.scheduling.recent_survival import RecentSurvival
from dspark_ray.scheduling.utility import Claims

MEAN = np.array([[0.8, 0.6, 0.45]])
FREE = np.zeros(4)


def costs(verify_ms: Sequence[float], draft_ms: Sequence[float] = (0, 0, 0, 0), group: float = 0.0) -> Costs:
    return Costs(np.asarray(verify_ms, dtype=np.float64), draft_ms, group)


def width(survival: np.ndarray, count: int, cost: Costs, *, on: bool = True) -> int:
    return best_width(survival, count, cost, now_on=on)


def test_whole_blocks_where_rows_are_cheap() -> None:
    assert width(MEAN, 1, costs(10 + 0.1 * np.arange(4))) == 3


def test_nothing_for_a_dear_drafter_or_dear_rows() -> None:
    assert width(MEAN, 1, costs(10 + 0.1 * np.arange(4), [0, 30, 30, 30])) == 0
    assert width(MEAN, 8, costs(10 + 10.0 * np.arange(25))) == 0


def test_no_wider_than_drafting_is_worth() -> None:
    """.8 for 2 ms is worth it beside 1 for 10 ms, .6 for 4 more is not beside 1.8 for 12."""
    assert width(MEAN, 1, costs([10.0] * 4, [0, 2, 6, 10])) == 1
    assert width(MEAN, 1, costs([10.0] * 4, [0, 2, 4, 6])) == 3


def test_recent_drafts_are_not_their_mean() -> None:
    """One request of two is sure: verifying its token alone pays where the mean of both would not."""
    mixed = np.array([[1.0], [0.0]])
    cost = Costs(np.array([10.0, 15.0, 20.0]), [0, 0.0])
    assert width(mixed, 2, Costs(np.array([10.0, 12.0, 14.0]), [0, 0.0])) == 1
    assert width(np.array([[0.5], [0.5]]), 2, cost) == 0


def test_coming_back_takes_a_gain() -> None:
    almost = costs([10.0] * 4, [0, 18.4, 18.4, 18.4])  # 2.85 tokens in 28.4 ms: .3% better than 1 in 10
    assert width(MEAN, 1, almost, on=True) == 3
    assert width(MEAN, 1, almost, on=False) == 0


def test_a_step_that_waits_for_its_group_has_time_to_draft() -> None:
    dear = costs(10 + 3.0 * np.arange(4), [0, 12, 12, 12])
    assert width(MEAN, 1, dear) == 0
    assert width(MEAN, 1, costs(10 + 3.0 * np.arange(4), [0, 12, 12, 12], group=40.0)) == 3


def test_claims_count_utility() -> None:
    """A request below its target counts twice: what does not pay for throughput pays for it."""
    verify = 10.0 + 9.0 * np.arange(4)
    assert width(MEAN, 1, costs(verify)) == 0
    owed = Claims(np.ones(1), np.array([1.0]), boost=20.0)
    plain = Claims(np.ones(1), np.zeros(1), boost=0.0)
    assert width(MEAN, 1, Costs(verify, FREE.tolist(), claims=plain)) == 0
    assert width(MEAN, 1, Costs(10.0 + 0.1 * np.arange(4), FREE.tolist(), claims=owed)) == 3


class Load:
    """A drafting switch at one load, and how often it asked for the costs."""

    def __init__(self, cost: Costs, survival: np.ndarray = MEAN) -> None:
        self.recent = RecentSurvival(3, delay=0)
        self.recent.note(survival.astype(np.float32), 3)
        self.claims = ClaimCorrection()
        self.drafting, self.cost, self.asked = Drafting(self.recent, self.claims), cost, 0

    def run(self, steps: int, count: int = 16) -> list[int]:
        """How many requests were drafted in each step."""
        return [self.drafting.plan(count, self._costs).num_requests for _ in range(steps)]

    def _costs(self) -> Costs:
        self.asked += 1
        return self.cost


def test_off_is_probed_ever_more_rarely_and_with_few() -> None:
    load = Load(costs(10 + 10.0 * np.arange(49)))
    drafted = load.run(4000)
    probes = np.flatnonzero(drafted)
    assert {drafted[p] for p in probes} == {2}  # an eighth of 16
    assert np.diff(probes).tolist()[:8] == [8, 16, 32, 64, 128, 256, 512, 512]
    assert load.asked < 4000 / 24


def test_on_drafts_all_but_for_a_plain_step_now_and_then() -> None:
    load = Load(costs([10.0] * 49))
    drafted = load.run(640)
    assert set(drafted) == {16, 0}
    assert drafted.count(0) == 10


def test_what_drafts_were_worth_lately_decides_too() -> None:
    """At half of what they claim, drafts no longer pay; without any to learn from they are believed again."""
    load = Load(costs(10 + 0.4 * np.arange(49)))
    assert load.run(1) == [16]
    for _ in range(100):
        load.claims.note(20.0, 8)
    assert max(load.run(40)[16:]) < 16
    for _ in range(3000):
        load.claims.note(0.0, 0)
    assert 16 in load.run(64)


def test_a_change_of_load_is_looked_at_at_once() -> None:
    load = Load(costs(10 + 10.0 * np.arange(49)))
    assert load.run(3)[1:] == [0, 0]
    load.cost = costs([10.0] * 49)
    assert load.run(1, count=4) == [4]


def test_nothing_to_draft() -> None:
    assert Load(costs([10.0])).run(1, count=0) == [0]


@pytest.mark.parametrize("scores", [np.full((2, 3), np.nan), np.zeros((2, 3))])
def test_hopeless_scores_mean_plain_decoding(scores: np.ndarray) -> None:
    assert width(scores, 2, costs([10.0] * 7, [0, 1, 1, 1])) == 0
