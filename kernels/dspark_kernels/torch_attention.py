"""The torch reference of paged attention: keys gathered to a padded batch, one masked SDPA call per group.

Requests with few rows (decoding) share one padded call; each long one (a prefill chunk) has its own, so that
padding never costs more than the work. NOTE: a batch without long requests runs without a host
synchronisation.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from dspark_kernels.attention import PagedBatch

SHORT_ROWS = 16  # up to this many rows a request is padded together with others


@dataclass(frozen=True, slots=True)
class _Group:
    """Some requests of the batch and their rows."""

    rows: Tensor | None  # [M] int64 rows of the flat batch, None: all of them
    start: Tensor  # [G] int64 first row of each request inside the group
    count: Tensor  # [G] int64 rows of each request
    kv_len: Tensor  # [G] int64
    block_tables: Tensor  # [G, max_blocks]
    num_rows: int
    max_count: int
    max_kv: int


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: "PagedBatch",
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    out = torch.empty_like(q)
    for group in _groups(batch, q.shape[0]):
        request, offset = _row_places(group, q.device)
        k, v = _gather_context(group, k_cache, v_cache, batch.block_size, q.dtype)
        key = torch.arange(group.max_kv, device=q.device)
        # The rows are the last `count` keys: row i sees keys up to kv_len - count + i. Padding rows see key
        # 0.
        row = torch.arange(group.max_count, device=q.device)
        last = (group.kv_len - group.count)[:, None] + row[None, :]
        last = torch.minimum(last, group.kv_len[:, None] - 1)
        mask = key[None, None, :] <= last[:, :, None]
        if window is not None:
            mask &= key[None, None, :] > last[:, :, None] - window
        _attend(out, q, k, v, mask, group, request, offset, scale, soft_cap)
    return out


def block_attention(
    q: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: "PagedBatch",
    scale: float,
) -> Tensor:
    out = torch.empty_like(q)
    for group in _groups(batch, q.shape[0]):
        request, offset = _row_places(group, q.device)
        k_context, v_context = _gather_context(group, k_cache, v_cache, batch.block_size, q.dtype)
        k = torch.cat([k_context, _pad_rows(k_block, group, request, offset)], dim=1)
        v = torch.cat([v_context, _pad_rows(v_block, group, request, offset)], dim=1)
        key = torch.arange(group.max_kv, device=q.device)
        row = torch.arange(group.max_count, device=q.device)
        mask = torch.cat([key[None, :] < group.kv_len[:, None], row[None, :] < group.count[:, None]], dim=1)
        mask = mask[:, None, :].expand(-1, group.max_count, -1)
        _attend(out, q, k, v, mask, group, request, offset, scale)
    return out


def _groups(batch: "PagedBatch", num_rows: int) -> list[_Group]:
    start = batch.query_start[:-1].long()
    count = batch.query_start[1:].long() - start
    kv_len = batch.kv_len.long()
    if batch.max_query <= SHORT_ROWS or len(kv_len) == 1:
        return [
            _Group(None, start, count, kv_len, batch.block_tables, num_rows, batch.max_query, batch.max_kv)
        ]
    counts, starts = count.tolist(), start.tolist()
    short = [r for r, n in enumerate(counts) if 0 < n <= SHORT_ROWS]
    members = ([short] if short else []) + [[r] for r, n in enumerate(counts) if n > SHORT_ROWS]
    groups = []
    for requests in members:
        rows = torch.cat([torch.arange(starts[r], starts[r] + counts[r]) for r in requests]).to(start.device)
        index = torch.tensor(requests, device=start.device)
        sizes = count[index]
        groups.append(
            _Group(
                rows,
                sizes.cumsum(0) - sizes,
                sizes,
                kv_len[index],
                batch.block_tables[index],
                len(rows),
                max(counts[r] for r in requests),
                int(kv_len[index].max()),
            )
        )
    return groups


def _row_places(group: _Group, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each row of the group: its request inside the group and its place there. [M] int64 each."""
    requests = torch.arange(len(group.count), device=device)
    request = torch.repeat_interleave(requests, group.count, output_size=group.num_rows)
    offset = torch.arange(group.num_rows, device=device) - group.start[request]
    return request, offset


def _gather_context(
    group: _Group, k_cache: Tensor, v_cache: Tensor, block_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values of the group, padded: [G, max_kv, KV, D] each; padding reads cache row 0."""
    position = torch.arange(group.max_kv, device=k_cache.device)
    if group.max_kv == 0:
        slots = torch.empty((len(group.count), 0), dtype=torch.int64, device=k_cache.device)
    else:
        slots = group.block_tables.long()[:, position // block_size] * block_size + position % block_size
        slots = torch.where(position[None, :] < group.kv_len[:, None], slots, 0)
    if k_cache.dtype == torch.float8_e4m3fn:
        return _of_float8(k_cache, slots, dtype), _of_float8(v_cache, slots, dtype)
    return k_cache[slots], v_cache[slots]


def _of_float8(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    return cache.view(torch.uint8)[slots].view(torch.float8_e4m3fn).to(dtype)


def _pad_rows(x: Tensor, group: _Group, request: Tensor, offset: Tensor) -> Tensor:
    """Rows [N, heads, D] of the flat batch → [G, max_count, heads, D], zeros where a request has fewer."""
    padded = x.new_zeros((len(group.count), group.max_count, *x.shape[1:]))
    padded[request, offset] = x if group.rows is None else x[group.rows]
    return padded


def _attend(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    group: _Group,
    request: Tensor,
    offset: Tensor,
    scale: float,
    soft_cap: float | None = None,
) -> None:
    """Attention of the group's rows into `out`. mask [G, max_count, keys] bool: true is seen."""
    padded = _pad_rows(q, group, request, offset).transpose(1, 2)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if soft_cap is not None:
        rows = _capped(padded, k, v, mask, scale, soft_cap).transpose(1, 2)[request, offset]
        out[slice(len(rows)) if group.rows is None else group.rows] = rows
        return
    result = F.scaled_dot_product_attention(
        padded, k, v, attn_mask=mask[:, None], scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    rows = result.transpose(1, 2)[request, offset]
    if group.rows is None:
        out.copy_(rows)
    else:
        out[group.rows] = rows


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, soft_cap: float) -> Tensor:
    """Spelt out, in fp32: SDPA has no soft cap. q [G, H, M, D], k and v [G, KV, S, D] → [G, H, M, D]"""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1).float() for x in (k, v))
    scores = soft_cap * torch.tanh(q.float() @ k.transpose(-1, -2) * (scale / soft_cap))
    return (scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1) @ v).to(q.dtype)
