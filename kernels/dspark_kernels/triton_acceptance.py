"""Triton: which drafted tokens stand and what comes after them, for a ragged batch. One program a request for
the count; the token after it is drawn by programs over the vocabulary."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.triton_choose import _CHUNK, _TILE, _first_cheapest, race


def leading_matches(chosen: Tensor, drafted: Tensor, row_start: Tensor, most: int) -> tuple[Tensor, Tensor]:
    requests = len(row_start) - 1
    counts, following = torch.empty((2, requests), dtype=torch.int64, device=chosen.device).unbind(0)
    if requests:
        _match_kernel[(requests,)](
            chosen, drafted, row_start, counts, following, TILE=triton.next_power_of_2(most + 1), num_warps=1
        )
    return counts, following


def accept(
    probs: Tensor,
    drafted: Tensor,
    row_start: Tensor,
    most: int,
    uniforms: Tensor,
    keys: Tensor,
    draft_probs: Tensor | None,
    one_hot: Tensor | None,
    vocab_map: Tensor | None,
    draft_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    requests, size = len(row_start) - 1, probs.shape[1]
    probs = probs.contiguous()
    columns = None
    if draft_probs is not None:
        draft_probs = draft_probs.contiguous()
        if vocab_map is not None:  # the draft column of each target id, −1: it is not in that vocabulary
            columns = torch.full((size,), -1, dtype=torch.int64, device=probs.device)
            columns[vocab_map] = torch.arange(len(vocab_map), device=probs.device)
    counts = torch.empty(requests, dtype=torch.int64, device=probs.device)
    chunks = triton.cdiv(size, _CHUNK)
    costs = torch.empty((2, requests, chunks), dtype=torch.float64, device=probs.device)
    places = torch.empty((2, requests, chunks), dtype=torch.int64, device=probs.device)
    width = size if draft_probs is None else draft_probs.shape[1]
    if requests:
        _count_kernel[(requests,)](
            probs,
            drafted,
            row_start,
            uniforms,
            probs if draft_probs is None else draft_probs,
            row_start if one_hot is None else one_hot,
            drafted if draft_ids is None else draft_ids,
            counts,
            size,
            width,
            HAS_Q=draft_probs is not None,
            HAS_ONE_HOT=one_hot is not None,
            TILE=triton.next_power_of_2(most + 1),
            num_warps=1,
        )
        _residual_kernel[(requests, chunks)](
            probs,
            drafted,
            row_start,
            keys,
            probs if draft_probs is None else draft_probs,
            row_start if one_hot is None else one_hot,
            counts if columns is None else columns,
            counts,
            costs,
            places,
            size,
            width,
            HAS_Q=draft_probs is not None,
            HAS_ONE_HOT=one_hot is not None,
            HAS_MAP=columns is not None,
            CHUNK=_CHUNK,
            TILE=_TILE,
        )
    drawn, from_p = (_first_cheapest(costs[i], places[i], None) for i in (0, 1))
    # p = q up to rounding leaves nothing: the rejection itself was rounding, and p is what is owed.
    return counts, torch.where(costs[0].amin(1).isinf(), from_p, drawn)


@triton.jit
def _match_kernel(chosen, drafted, row_start, counts, following, TILE: tl.constexpr):
    request = tl.program_id(0)
    first = tl.load(row_start + request).to(tl.int64)
    length = tl.load(row_start + request + 1).to(tl.int64) - first - 1
    place = tl.arange(0, TILE)
    inside = place < length
    differs = tl.load(chosen + first + place, mask=inside, other=0) != tl.load(
        drafted + first + place, mask=inside, other=0
    )
    count = tl.min(tl.where(inside & differs, place, length), axis=0)
    tl.store(counts + request, count)
    tl.store(following + request, tl.load(chosen + first + count))


@triton.jit
def _count_kernel(
    probs, drafted, row_start, uniforms, draft_probs, one_hot, draft_ids, counts, size, width,
    HAS_Q: tl.constexpr, HAS_ONE_HOT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Leading draft tokens that pass u · q(x) < p(x)."""
    request = tl.program_id(0)
    first = tl.load(row_start + request).to(tl.int64)
    length = tl.load(row_start + request + 1).to(tl.int64) - first - 1
    place = tl.arange(0, TILE)
    inside = place < length
    row = first + place
    token = tl.load(drafted + row, mask=inside, other=0)
    p = tl.load(probs + row * size + token, mask=inside, other=0.0).to(tl.float64)
    u = tl.load(uniforms + row, mask=inside, other=0.0)
    q = tl.full([TILE], 1.0, tl.float64)
    if HAS_Q:
        column = tl.load(draft_ids + row, mask=inside, other=0)
        q = tl.load(draft_probs + row * width + column, mask=inside, other=0.0).to(tl.float64)
        if HAS_ONE_HOT:
            q = tl.where(tl.load(one_hot + request).to(tl.int32) != 0, 1.0, q)
    rejected = inside & (u * q >= p)
    tl.store(counts + request, tl.min(tl.where(rejected, place, length), axis=0))


@triton.jit
def _residual_kernel(
    probs, drafted, row_start, keys, draft_probs, one_hot, columns, counts, costs, places,
    size, width,
    HAS_Q: tl.constexpr, HAS_ONE_HOT: tl.constexpr, HAS_MAP: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Two races over a chunk of the row that decides: over max(0, p − q) where its draft token was rejected,
    else p, and over p."""
    request = tl.program_id(0)
    chunk = tl.program_id(1)
    first = tl.load(row_start + request).to(tl.int64)
    length = tl.load(row_start + request + 1).to(tl.int64) - first - 1
    count = tl.load(counts + request)
    row = first + count
    is_rejected = count < length
    spread = 0  # columns of p that a row of draft_probs is taken from
    refused = tl.load(drafted + row)  # q is all here; −1: it is not
    if HAS_Q:
        spread = size
        if HAS_ONE_HOT:
            is_hot = tl.load(one_hot + request).to(tl.int32)
            spread = tl.where(is_hot != 0, 0, size)
            refused = tl.where(is_hot != 0, refused, -1)
        else:
            refused = tl.full([], -1, tl.int64)
    spread = tl.where(is_rejected, spread, 0)
    refused = tl.where(is_rejected, refused, -1)
    key = tl.load(keys + request)
    begin_chunk = chunk * CHUNK
    best = tl.full([], float("inf"), tl.float64)
    best_p = tl.full([], float("inf"), tl.float64)
    found = begin_chunk
    found_p = begin_chunk
    for begin in range(begin_chunk, tl.minimum(begin_chunk + CHUNK, size), TILE):
        column = begin + tl.arange(0, TILE)
        inside = column < size
        token = column.to(tl.int64)
        p = tl.load(probs + row * size + column, mask=inside, other=0.0)
        weight = p
        if HAS_Q:
            source = token
            known = column < spread
            if HAS_MAP:
                source = tl.load(columns + column, mask=inside, other=-1)
                known = known & (source >= 0)
            weight = p - tl.load(draft_probs + row * width + source, mask=known, other=0.0)
        weight = tl.where(token == refused, p - 1.0, weight)
        best, found = race(key, token, weight.to(tl.float64), column, best, found)
        best_p, found_p = race(key, token, p.to(tl.float64), column, best_p, found_p)
    at = request.to(tl.int64) * tl.num_programs(1) + chunk
    other = at + tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    tl.store(costs + at, best)
    tl.store(places + at, found.to(tl.int64))
    tl.store(costs + other, best_p)
    tl.store(places + other, found_p.to(tl.int64))
