"""Accepted lengths on sequences whose answer is known."""

import torch

from dspark_ray.training.validation import greedy_walk


def test_greedy_walk_counts_the_bonus_token() -> None:
    # Anchor 0 accepts 2, so the next anchor is 3, which accepts 0; then 4, which accepts the rest.
    assert greedy_walk(torch.tensor([2, 9, 9, 0, 1, 0])) == (6, 3)


def test_greedy_walk_without_any_acceptance() -> None:
    assert greedy_walk(torch.zeros(5, dtype=torch.int64)) == (5, 5)
