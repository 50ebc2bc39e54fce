"""Anchors and packing: many blocks of a few sequences in one batch, each bounded by its own anchor.

Blocks are packed in groups of `GROUP_BLOCKS` of one sequence. The sequence's context is projected once and
shared by its groups; the mask lets a slot see the context before its anchor and its own block, nothing else.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspark_ray.training.cache import CachedSequence

GROUP_BLOCKS = 8  # A: blocks in one group


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """B sequences of at most S context tokens, N groups of A blocks of γ slots."""

    tokens: Tensor  # [B, S] int64, 0 past a sequence's end
    taps: Tensor  # [B, S, n_taps · H] bf16
    group_sequence: Tensor  # [N] int64: which of the B sequences
    anchors: Tensor  # [N, A] int64: absolute positions
    previous_ids: (
        Tensor  # [N, A, γ] int64: tokens at anchor + 0 .. γ−1 (teacher forcing); slot 0 is the anchor
    )
    label_ids: Tensor  # [N, A, γ] int64: tokens at anchor + 1 .. γ
    valid: Tensor  # [N, A, γ] bool: the label lies in the response
    top_ids: Tensor  # [N, A, γ, K] int64: the target's most probable tokens at the label's position
    top_probs: Tensor  # [N, A, γ, K] fp32
    numbers: tuple[int, ...] = field(default=(), kw_only=True)  # of the sequences in the cache: a name

    @property
    def num_blocks(self) -> int:
        """Blocks with at least one label."""
        return int(self.valid.any(-1).sum())


def choose_anchors(sequence: CachedSequence, count: int, generator: torch.Generator) -> Tensor:
    """Up to `count` distinct anchors in the response, the last token excluded (it has no label). Sorted."""
    candidates = len(sequence.tokens) - 1 - sequence.prompt_length
    picked = torch.randperm(candidates, generator=generator)[:count]
    return picked.sort().values + sequence.prompt_length


def pack(sequences: list[CachedSequence], anchors: list[Tensor], block_size: int) -> TrainingBatch:
    """One batch; the last group of a sequence is filled up with blocks that carry no label."""
    longest = max(len(s.tokens) for s in sequences)
    tokens = torch.zeros(len(sequences), longest, dtype=torch.int64)
    taps = torch.zeros(len(sequences), longest, sequences[0].taps.shape[1], dtype=torch.bfloat16)
    groups: list[tuple[Tensor, ...]] = []
    owners: list[int] = []
    for number, (sequence, chosen) in enumerate(zip(sequences, anchors, strict=True)):
        tokens[number, : len(sequence.tokens)] = sequence.tokens
        taps[number, : len(sequence.tokens)] = sequence.taps
        padding = -len(chosen) % GROUP_BLOCKS
        real = torch.ones(len(chosen) + padding, dtype=torch.bool)
        real[len(chosen) :] = False
        chosen = torch.cat((chosen, chosen[-1:].expand(padding)))
        groups.append(_blocks(sequence, chosen, real, block_size))
        owners += [number] * (len(chosen) // GROUP_BLOCKS)
    joined = [torch.cat(parts) for parts in zip(*groups, strict=True)]
    grouped = [part.view(len(owners), GROUP_BLOCKS, *part.shape[1:]) for part in joined]
    return TrainingBatch(tokens, taps, torch.tensor(owners), *grouped)


def _blocks(sequence: CachedSequence, anchors: Tensor, real: Tensor, block_size: int) -> tuple[Tensor, ...]:
    """The per-block fields of `TrainingBatch` for one sequence, blocks first."""
    offsets = torch.arange(block_size)
    last = len(sequence.tokens) - 1
    previous = anchors[:, None] + offsets
    labels = previous + 1
    valid = (labels <= last) & real[:, None]
    row = labels.clamp(max=last) - sequence.prompt_length
    return (
        anchors,
        sequence.tokens[previous.clamp(max=last)],
        sequence.tokens[labels.clamp(max=last)],
        valid,
        sequence.top_ids[row],
        sequence.top_probs[row],
    )


def visibility(starts: Tensor, ends: Tensor, context_length: int) -> Tensor:
    """The context that blocks may look at. starts and ends [N, A] positions → bool [N, A, context_length]"""
    position = torch.arange(context_length)
    return (position >= starts[..., None]) & (position < ends[..., None])


def own_block(num_blocks: int, num_slots: int) -> Tensor:
    """Slots see their own block. → bool [A · slots, A · slots]"""
    return torch.block_diag(*[torch.ones(num_slots, num_slots, dtype=torch.bool)] * num_blocks)


def positions(anchors: Tensor, num_slots: int) -> Tensor:
    """Absolute positions of the slots. anchors [N, A] → [N, A · slots]."""
    return (anchors[..., None] + torch.arange(num_slots)).flatten(1)
