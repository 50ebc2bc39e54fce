"""The width of drafts: shrinks to what is verified, grows again one token at a time."""

import itertools

import numpy as np

from dspark_ray.scheduling.width import DraftWidth


def note(width: DraftWidth, lens: list[int], steps: int = 1, drafted: int | None = None) -> None:
    for _ in range(steps):
        width.note(np.array(lens), np.full(len(lens), width.tokens() if drafted is None else drafted))


def test_starts_at_the_whole_block() -> None:
    assert DraftWidth(7).tokens() == 7


def test_shrinks_to_one_more_than_what_is_verified() -> None:
    width = DraftWidth(7)
    note(width, [2, 1, 0, 2], steps=200)
    assert width.tokens() == 3


def test_never_below_one() -> None:
    width = DraftWidth(7)
    note(width, [0, 0], steps=200)
    assert width.tokens() == 1


def test_grows_again_when_the_spare_token_is_verified() -> None:
    width = DraftWidth(7)
    note(width, [1], steps=200)
    assert width.tokens() == 2
    seen = []
    for _ in range(60):
        note(width, [width.tokens()])
        seen.append(width.tokens())
    assert seen[-1] == 7
    assert all(b - a <= 1 for a, b in itertools.pairwise(seen))


def test_a_rare_long_draft_does_not_widen_every_block() -> None:
    width = DraftWidth(7)
    for step in range(2000):
        note(width, [7 if step % 100 == 0 and request == 0 else 1 for request in range(8)], drafted=7)
    assert width.tokens() == 2


def test_requests_without_a_draft_say_nothing() -> None:
    width = DraftWidth(7)
    note(width, [0, 0], steps=500, drafted=0)
    assert width.tokens() == 7
