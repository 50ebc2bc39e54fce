"""Triton: paged attention for flat, ragged batches whose lengths are known on the device alone.

The grid depends on the number of rows only, never on how they are shared out: each row has a marker, the
request it belongs to (−1: a pad row), and the program of a row leaves at once unless a tile of its request
begins there. So a captured graph replays with other lengths. Query heads that share a KV head are rows
of one tile: its keys are read once for all of them.

With few programs and long contexts the keys are split: each program leaves its part (sum, largest score,
weight), and a second kernel merges them.
"""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from dspark_kernels.attention import PagedBatch

_MAX_TILE = 64  # query rows × heads of a program
_SPLIT_KEYS = 256  # a split has at least so many
_MAX_SPLITS = 32
_NO_GPU_PROCESSORS = 16  # for the interpreter: small, so that tests split


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the work of a call is cut."""

    rows: int  # query rows of a program
    keys: int  # keys of an iteration
    splits: int  # programs that share a row's keys


def choose_tiling(
    q: Tensor, num_kv_heads: int, batch: "PagedBatch", element_bytes: int, splits: int | None = None
) -> Tiling:
    """From shapes and the host's maxima; nothing is read from the device."""
    group = q.shape[1] // num_kv_heads
    rows = max(1, min(triton.next_power_of_2(batch.max_query), _MAX_TILE // triton.next_power_of_2(group)))
    if splits is None:
        tiles = max(len(batch.kv_len), q.shape[0] // rows)
        wanted = triton.cdiv(2 * _processors(q.device), tiles * num_kv_heads)
        useful = max(1, batch.max_kv // _SPLIT_KEYS)
        splits = triton.next_power_of_2(min(wanted, useful, _MAX_SPLITS))
    return Tiling(rows, 64 if element_bytes == 2 else 32, splits)


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _NO_GPU_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: "PagedBatch",
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    *,
    splits: int | None = None,
) -> Tensor:
    """`splits`: of the keys; None: by load."""
    return _attend(q, None, None, k_cache, v_cache, batch, scale, window, soft_cap, splits)


def block_attention(
    q: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: "PagedBatch",
    scale: float,
    *,
    splits: int | None = None,
) -> Tensor:
    block = (k_block.contiguous(), v_block.contiguous())
    return _attend(q, *block, k_cache, v_cache, batch, scale, None, None, splits)


def _attend(
    q: Tensor,
    k_block: Tensor | None,
    v_block: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: "PagedBatch",
    scale: float,
    window: int | None,
    soft_cap: float | None,
    splits: int | None,
) -> Tensor:
    q = q.contiguous()
    out = torch.empty_like(q)
    rows, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    if not rows:
        return out
    assert k_cache.dtype == v_cache.dtype
    assert k_cache.dtype in (q.dtype, torch.float8_e4m3fn)
    assert k_cache.stride()[1:] == v_cache.stride()[1:] == (dim, 1)
    tiling = choose_tiling(q, kv_heads, batch, q.element_size(), splits)
    markers = batch.markers(rows)
    dim_tile = max(16, triton.next_power_of_2(dim))
    split = tiling.splits > 1
    partial = q.new_empty((tiling.splits, rows, heads, dim), dtype=torch.float32) if split else out
    # The largest score and the weight of each part.
    weights = q.new_empty((2, tiling.splits, rows, heads) if split else (1,), dtype=torch.float32)
    group = heads // kv_heads
    _attention_kernel[(rows, kv_heads, tiling.splits)](
        q,
        k_cache,
        v_cache,
        q if k_block is None else k_block,
        q if v_block is None else v_block,
        partial,
        weights,
        markers,
        batch.query_start,
        batch.kv_len,
        batch.block_tables,
        batch.block_tables.stride(0),
        k_cache.stride(0),
        v_cache.stride(0),
        scale,
        0.0 if soft_cap is None else soft_cap,
        0 if window is None else window,
        rows,
        GROUP=group,
        KV_HEADS=kv_heads,
        DIM=dim,
        DIM_TILE=dim_tile,
        ROWS=tiling.rows,
        TILE=max(16, triton.next_power_of_2(tiling.rows * group)),
        KEYS=tiling.keys,
        PAGE=batch.block_size,
        SPLITS=tiling.splits,
        BLOCK=k_block is not None,
        WINDOW=window is not None,
        SOFT_CAP=soft_cap is not None,
        num_warps=4,
        num_stages=2,
    )
    if split:
        _merge_kernel[(rows, heads)](
            out,
            partial,
            weights,
            markers,
            rows,
            heads,
            DIM=dim,
            DIM_TILE=dim_tile,
            SPLITS=tiling.splits,
            num_warps=2,
        )
    return out


@triton.jit
def _attention_kernel(
    q, k_cache, v_cache, k_block, v_block, out, weights, markers, query_start, kv_lens, tables,
    table_stride, k_stride, v_stride, scale, soft_cap, window, num_rows,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    request = tl.load(markers + row)
    place = tl.arange(0, TILE)
    tile_row = place // GROUP  # a query row's heads are side by side
    head = kv_head * GROUP + place % GROUP
    column = tl.arange(0, DIM_TILE)
    in_dim = column < DIM
    if request < 0:  # a pad row: zeros, so that nothing undefined flows on
        if SPLITS == 1:
            own = (place < GROUP)[:, None] & in_dim[None, :]
            first = (row.to(tl.int64) * KV_HEADS * GROUP + head)[:, None] * DIM + column[None, :]
            tl.store(out + first, tl.zeros([TILE, DIM_TILE], out.dtype.element_ty), mask=own)
        return
    begin = tl.load(query_start + request)
    count = tl.load(query_start + request + 1) - begin
    offset = row - begin
    if offset % ROWS != 0:
        return
    kv_len = tl.load(kv_lens + request)
    inside = (tile_row < ROWS) & (offset + tile_row < count)
    at = ((row + tile_row).to(tl.int64) * KV_HEADS * GROUP + head)[:, None] * DIM + column[None, :]
    mask = inside[:, None] & in_dim[None, :]
    queries = tl.load(q + at, mask=mask, other=0.0)

    if BLOCK:
        last = tl.zeros([TILE], tl.int32) + kv_len - 1
        lowest = 0
        end = kv_len
    else:  # the rows are the last `count` keys
        last = kv_len - count + offset + tile_row
        end = tl.minimum(kv_len, kv_len - count + offset + ROWS)
        lowest = 0
        if WINDOW:
            lowest = tl.maximum(0, kv_len - count + offset - window + 1) // KEYS * KEYS
    # Each split has a stretch of whole iterations.
    if SPLITS == 1:
        start = lowest
        stop = end
    else:
        stretch = tl.cdiv(tl.cdiv(end - lowest, SPLITS), KEYS) * KEYS
        start = lowest + split * stretch
        stop = tl.minimum(end, start + stretch)

    largest = tl.full([TILE], float("-inf"), tl.float32)
    weight = tl.zeros([TILE], tl.float32)
    total = tl.zeros([TILE, DIM_TILE], tl.float32)
    for first_key in range(start, stop, KEYS):
        key = first_key + tl.arange(0, KEYS)
        stored = key < end
        page = tl.load(tables + request.to(tl.int64) * table_stride + key // PAGE, mask=stored, other=0)
        slot = page.to(tl.int64) * PAGE + key % PAGE
        k = tl.load(
            k_cache + (slot * k_stride + kv_head * DIM)[None, :] + column[:, None],
            mask=in_dim[:, None] & stored[None, :],
            other=0.0,
        )
        v = tl.load(
            v_cache + (slot * v_stride + kv_head * DIM)[:, None] + column[None, :],
            mask=stored[:, None] & in_dim[None, :],
            other=0.0,
        )
        k, v = k.to(queries.dtype), v.to(queries.dtype)  # of a cache in float8
        seen = inside[:, None] & (key[None, :] <= last[:, None])
        if WINDOW:
            seen = seen & (key[None, :] > (last - window)[:, None])
        largest, weight, total = _add_keys(
            queries, k, v, seen, largest, weight, total, scale, soft_cap, SOFT_CAP
        )
    if BLOCK:  # the last split has the block's own keys
        for first_key in range(0, tl.where(split == SPLITS - 1, count, 0), KEYS):
            key = first_key + tl.arange(0, KEYS)
            stored = key < count
            source = ((begin + key).to(tl.int64) * KV_HEADS + kv_head) * DIM
            k = tl.load(
                k_block + source[None, :] + column[:, None],
                mask=in_dim[:, None] & stored[None, :],
                other=0.0,
            )
            v = tl.load(
                v_block + source[:, None] + column[None, :],
                mask=stored[:, None] & in_dim[None, :],
                other=0.0,
            )
            seen = inside[:, None] & stored[None, :]
            largest, weight, total = _add_keys(
                queries, k, v, seen, largest, weight, total, scale, soft_cap, SOFT_CAP
            )
    if SPLITS == 1:
        result = total / tl.where(weight > 0.0, weight, 1.0)[:, None]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)
    else:
        num_heads = KV_HEADS * GROUP
        part = split.to(tl.int64) * num_rows * num_heads
        num_parts = tl.full([], SPLITS, tl.int64) * num_rows * num_heads
        tl.store(out + part * DIM + at, total, mask=mask)
        which = part + (row + tile_row).to(tl.int64) * num_heads + head
        tl.store(weights + which, largest, mask=inside)
        tl.store(weights + num_parts + which, weight, mask=inside)


@triton.jit
def _add_keys(queries, k, v, seen, largest, weight, total, scale, soft_cap, SOFT_CAP: tl.constexpr):
    """One iteration of the running softmax (Milakov and Gimelshein 2018), in powers of two."""
    scores = tl.dot(queries, k, input_precision="ieee") * scale
    if SOFT_CAP:  # cap · tanh(score / cap)
        scores = soft_cap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / soft_cap)) + 1.0))
    scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))
    now = tl.maximum(largest, tl.max(scores, axis=1))
    base = tl.where(now == float("-inf"), 0.0, now)  # a row that has seen no key yet
    share = tl.exp2(scores - base[:, None])
    kept = tl.exp2(largest - base)
    total = total * kept[:, None] + tl.dot(share.to(v.dtype), v, input_precision="ieee")
    return now, weight * kept + tl.sum(share, axis=1), total


@triton.jit
def _merge_kernel(
    out, partial, weights, markers, num_rows, num_heads,
    DIM: tl.constexpr, DIM_TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    which = row.to(tl.int64) * num_heads + tl.program_id(1)
    column = tl.arange(0, DIM_TILE)
    in_dim = column < DIM
    if tl.load(markers + row) < 0:
        tl.store(out + which * DIM + column, tl.zeros([DIM_TILE], out.dtype.element_ty), mask=in_dim)
        return
    split = tl.arange(0, SPLITS)
    part = split.to(tl.int64) * num_rows * num_heads + which
    largest = tl.load(weights + part)
    weight = tl.load(weights + tl.full([], SPLITS, tl.int64) * num_rows * num_heads + part)
    top = tl.max(largest, axis=0)
    kept = tl.exp2(largest - tl.where(top == float("-inf"), 0.0, top))
    sums = tl.load(partial + part[:, None] * DIM + column[None, :], mask=in_dim[None, :], other=0.0)
    total = tl.sum(sums * kept[:, None], axis=0)
    divisor = tl.sum(weight * kept, axis=0)
    result = total / tl.where(divisor > 0.0, divisor, 1.0)
    tl.store(out + which * DIM + column, result.to(out.dtype.element_ty), mask=in_dim)
