"""Attention over a paged KV cache for a flat, ragged batch.

Key j of request r lives in cache row `block_tables[r, j // block_size] * block_size + j % block_size`. Query
head h reads key/value head h // (H / KV).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dspark_kernels.dispatch import ops_for


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Where each request's rows and keys are. The host-side maxima spare a device synchronisation."""

    query_start: Tensor  # [R + 1] int32, request r's rows are query_start[r] : query_start[r + 1]
    kv_len: Tensor  # [R] int32, keys of each request in the cache
    block_tables: Tensor  # [R, max_blocks] int32
    block_size: int  # cache rows per block
    max_query: int  # most rows of one request
    max_kv: int  # most keys of one request
    # [N] int32, the request of each row, −1: a pad row, which belongs to none. None: made when it is needed.
    row_request: Tensor | None = None
    # Of a batch that was copied to a device: the same one on the host, for whoever plans there. None: its
    # lengths are the device's own, and may be others when a captured pass is replayed.
    on_host: "PagedBatch | None" = None

    def __post_init__(self) -> None:
        for tensor in (self.query_start, self.kv_len, self.block_tables, self.row_request):
            assert tensor is None or tensor.dtype == torch.int32, f"int32 wanted, got {tensor.dtype}"
            assert tensor is None or tensor.stride(-1) == 1, "the last dimension must be contiguous"

    def to(self, device: torch.device) -> "PagedBatch":
        """The same batch on that device, in the order of its work: the host does not wait."""
        markers = self.row_request
        return replace(
            self,
            query_start=self.query_start.to(device, non_blocking=True),
            kv_len=self.kv_len.to(device, non_blocking=True),
            block_tables=self.block_tables.to(device, non_blocking=True),
            row_request=None if markers is None else markers.to(device, non_blocking=True),
            on_host=self if self.query_start.is_cpu else self.on_host,
        )

    def markers(self, num_rows: int) -> Tensor:
        """`row_request`; made of `query_start` on its device where there is none."""
        if self.row_request is not None:
            return self.row_request
        rows = torch.arange(num_rows, dtype=torch.int32, device=self.query_start.device)
        found = torch.searchsorted(self.query_start, rows, right=True, out_int32=True) - 1
        return torch.where(rows < self.query_start[-1], found, -1)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Causal attention of each request's rows, which are the last of its `kv_len` keys. With a window a row
    sees so many keys at most, its own included; a soft cap c makes c · tanh(s / c) of each score s.

    Their own keys and values must already be in the cache. Decoding requests (a few rows) and prefill chunks
    (hundreds) mix in one call. q [N, H, D], k_cache and v_cache [S, KV, D] → [N, H, D].

    A cache in float8 is read as the numbers that it holds (rope.py): the caller has the scales in `scale` and
    on the result.
    """
    return ops_for(q).paged_attention(q, k_cache, v_cache, batch, scale, window, soft_cap)


def block_attention(
    q: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    scale: float,
) -> Tensor:
    """A drafter's attention: each row sees all `kv_len` context keys and every row of its own block, both
    ways.

    `kv_len` may be 0. q [N, H, D], k_block and v_block [N, KV, D] (the block's own), k_cache and v_cache [S,
    KV, D] → [N, H, D].
    """
    return ops_for(q).block_attention(q, k_block, v_block, k_cache, v_cache, batch, scale)
