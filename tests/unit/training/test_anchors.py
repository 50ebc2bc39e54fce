"""Packing: which token goes where, and what a slot may look at."""

import torch

from dspark_ray.training.anchors import GROUP_BLOCKS, choose_anchors, own_block, pack, positions, visibility
from tests.unit.training.conftest import make_sequence


def test_anchors_lie_in_the_response_and_have_a_label() -> None:
    sequence = make_sequence(prompt_length=5, response_length=6)
    chosen = choose_anchors(sequence, 100, torch.Generator().manual_seed(0))
    assert chosen.tolist() == [5, 6, 7, 8, 9]  # 10 is the last token: nothing follows it
    few = choose_anchors(sequence, 3, torch.Generator().manual_seed(0))
    assert len(few.unique()) == 3


def test_block_contents() -> None:
    sequence = make_sequence(prompt_length=3, response_length=6)
    batch = pack([sequence], [torch.tensor([4, 7])], block_size=3)
    tokens = sequence.tokens
    assert batch.anchors.shape == (1, GROUP_BLOCKS)
    assert batch.anchors[0, :2].tolist() == [4, 7]
    assert batch.previous_ids[0, 0].tolist() == tokens[4:7].tolist()
    assert batch.label_ids[0, 0].tolist() == tokens[5:8].tolist()
    assert batch.valid[0, 0].tolist() == [True, True, True]
    assert batch.valid[0, 1].tolist() == [True, False, False]  # only token 8 follows anchor 7
    assert not batch.valid[0, 2:].any()  # blocks that fill the group up
    assert batch.num_blocks == 2
    # Row j of the target's probabilities is response position j: label 5 is row 2.
    assert torch.equal(batch.top_ids[0, 0], sequence.top_ids[2:5])
    assert torch.equal(batch.top_probs[0, 0], sequence.top_probs[2:5])


def test_groups_belong_to_one_sequence() -> None:
    short, long = make_sequence(3, 5, seed=1), make_sequence(4, 20, seed=2)
    batch = pack([short, long], [torch.tensor([3, 4]), torch.arange(4, 15)], block_size=2)
    assert batch.group_sequence.tolist() == [0, 1, 1]
    assert batch.taps.shape == (2, 24, 6)
    assert torch.equal(batch.taps[0, :8], short.taps)
    assert not batch.taps[0, 8:].any()


def test_visibility() -> None:
    starts, ends = torch.tensor([[0, 1]]), torch.tensor([[2, 4]])
    assert visibility(starts, ends, 5).tolist() == [
        [[True, True, False, False, False], [False, True, True, True, False]]
    ]


def test_own_block() -> None:
    first, second = [True, True, False, False], [False, False, True, True]
    assert own_block(num_blocks=2, num_slots=2).tolist() == [first, first, second, second]


def test_positions() -> None:
    assert positions(torch.tensor([[2, 7]]), 3).tolist() == [[2, 3, 4, 7, 8, 9]]
