"""The live correction follows lasting changes, shrugs off outliers and shares what it knows."""

import numpy as np
import pytest

from dspark_ray.scheduling.correction import ClaimCorrection, OnlineCorrection


def run(correction: OnlineCorrection, rows: int, ratio: float, steps: int) -> None:
    for _ in range(steps):
        correction.update(rows, 10.0, 10.0 * ratio)


def factor(correction: OnlineCorrection, rows: int) -> float:
    return float(correction.factor(np.array([rows]))[0])


def test_nothing_is_corrected_before_the_first_step():
    assert OnlineCorrection().factor(np.array([1, 7, 500])).tolist() == [1.0, 1.0, 1.0]


def test_a_lasting_change_is_followed():
    correction = OnlineCorrection()
    run(correction, 6, 1.0, 100)
    run(correction, 6, 1.5, 60)
    assert factor(correction, 6) == pytest.approx(1.5, rel=0.03)


def test_a_machine_many_times_slower_is_reached_too():
    correction = OnlineCorrection()
    run(correction, 6, 8.0, 200)
    assert factor(correction, 6) == pytest.approx(8.0, rel=0.05)


def test_one_stall_passes_almost_unseen():
    correction = OnlineCorrection()
    run(correction, 6, 1.0, 100)
    run(correction, 6, 500.0, 1)
    assert factor(correction, 6) < 1.08


def test_sizes_never_run_take_the_mean_and_run_ones_their_own():
    correction = OnlineCorrection()
    for _ in range(200):
        correction.update(3, 10.0, 20.0)
        correction.update(200, 10.0, 10.0)
    assert factor(correction, 3) == pytest.approx(2.0, rel=0.1)
    assert factor(correction, 192) == pytest.approx(1.0, rel=0.1)
    assert 1.2 < factor(correction, 20000) < 1.7


def test_an_abandoned_size_returns_to_the_mean():
    correction = OnlineCorrection()
    run(correction, 64, 3.0, 20)
    before = factor(correction, 48)
    run(correction, 2, 1.0, 4000)
    assert before > 2.0
    assert factor(correction, 48) < 1.1


@pytest.mark.parametrize(
    ("rows", "predicted", "measured"),
    [(0, 10, 10), (4, 0, 10), (4, 10, 0), (4, np.nan, 10), (4, 10, np.inf), (4, 10, -1)],
)
def test_nonsense_is_ignored(rows, predicted, measured):
    correction = OnlineCorrection()
    correction.update(rows, predicted, measured)
    assert factor(correction, 4) == 1.0


def test_huge_steps_fit_the_last_bucket():
    correction = OnlineCorrection()
    correction.update(1 << 40, 10.0, 12.0)
    assert factor(correction, 1 << 40) > 1.0


def test_claims_are_worth_what_came_of_them() -> None:
    claims = ClaimCorrection()
    assert claims.factor == 1.0
    for _ in range(400):
        claims.note(4.0, 3)
    assert claims.factor == pytest.approx(0.75, abs=0.02)
    for _ in range(4000):
        claims.note(0.0, 0)
    assert claims.factor == pytest.approx(1.0, abs=0.01)


def test_claims_are_corrected_within_bounds() -> None:
    claims = ClaimCorrection()
    for accepted, bound in ((0, 0.5), (100, 1.25)):
        for _ in range(2000):
            claims.note(4.0, accepted)
        assert claims.factor == bound


def test_a_single_step_says_little_about_claims() -> None:
    claims = ClaimCorrection()
    claims.note(2.0, 0)
    assert claims.factor > 0.9
