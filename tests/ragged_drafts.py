"""Ragged batches of drafts for tests of acceptance kernels."""

import itertools
from typing import Any

import torch

KINDS = ("one hot", "q", "some one hot", "reduced vocabulary", "p is q")


def ragged_drafts(
    lengths: list[int], vocab: int, device: torch.device
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """(rows M, row_start [R + 1], drafted tokens [M])."""
    rows = sum(lengths) + len(lengths)
    start = torch.tensor([0, *itertools.accumulate(n + 1 for n in lengths)], dtype=torch.int32, device=device)
    return rows, start, torch.randint(0, vocab, (rows,), device=device)


def rejection_case(kind: str, vocab: int, device: torch.device) -> tuple[Any, ...]:
    """Arguments of `accept`, drafts of one of `KINDS`."""
    lengths = [3, 0, 8, 7, 1, 1, 2]
    rows, start, drafted = ragged_drafts(lengths, vocab, device)
    probs = torch.softmax(torch.randn(rows, vocab, device=device) * 2, dim=-1)
    uniforms = torch.rand(rows, device=device, dtype=torch.float64)
    uniforms[::2] = 0.0  # these stand, however unlikely
    keys = torch.randint(-(2**63), 2**63 - 1, (len(lengths),), device=device)
    q = torch.softmax(torch.randn(rows, vocab, device=device) * 2, dim=-1)
    extra: tuple[torch.Tensor | None, ...] = {
        "one hot": (None, None, None, None),
        "q": (q, None, None, None),
        "some one hot": (q, torch.arange(len(lengths), device=device) % 2 == 0, None, None),
        "p is q": (probs.clone(), None, None, None),
        "reduced vocabulary": (None, None, None, None),
    }[kind]
    if kind == "reduced vocabulary":
        vocab_map = torch.randperm(vocab, device=device)[: vocab // 2].sort().values
        draft_ids = torch.randint(0, len(vocab_map), (rows,), device=device)
        drafted = vocab_map[draft_ids]
        extra = (torch.softmax(q[:, : len(vocab_map)], dim=-1), None, vocab_map, draft_ids)
    if kind == "p is q":
        uniforms.fill_(1.0)  # rejected by rounding, as it were: nothing is left of p − q
    return probs, drafted, start, max(lengths), uniforms, keys, *extra
