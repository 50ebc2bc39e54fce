"""What drafts have lately been worth."""

import numpy as np
import pytest

from dspark_ray.scheduling.recent_survival import RecentSurvival


def block(*values: float) -> np.ndarray:
    return np.array([values], dtype=np.float32)


def test_scores_enter_when_they_are_old_enough() -> None:
    recent = RecentSurvival(2, delay=2)
    guess = recent.mean.tolist()
    assert guess == pytest.approx([0.7, 0.49])
    recent.note(block(0.2, 0.1), 2)
    recent.note(block(0.9, 0.9), 2)
    assert recent.mean.tolist() == guess
    recent.note(block(0.5, 0.5), 2)
    assert recent.mean.tolist() == pytest.approx([0.2, 0.1])  # the guess is gone


def test_the_window_forgets() -> None:
    recent = RecentSurvival(1, delay=0)
    for _ in range(10):
        recent.note(np.full((64, 1), 0.1, dtype=np.float32), 1)
    assert recent.rows.shape == (96, 1)
    recent.note(np.full((96, 1), 0.9, dtype=np.float32), 1)
    assert recent.mean.tolist() == pytest.approx([0.9])


def test_positions_that_were_not_drafted_fall_off_as_the_mean_does() -> None:
    recent = RecentSurvival(3, delay=0)
    recent.note(block(0.8, 0.4, 0.1), 3)
    recent.note(block(0.5, 0.0, 0.0), 1)
    assert recent.rows[-1].tolist() == pytest.approx([0.5, 0.25, 0.0625])
