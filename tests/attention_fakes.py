"""FlashAttention and FlashInfer, as their documentation describes them, in plain torch on the CPU.

with installed(flash_attn=fake_flash_attn()):   # a module of that name, for as long as the block lasts
    ...

Signatures are the libraries' own, with their parameters in their order, so a call that would not bind there
does not bind here. Each row's keys are found anew from the arguments' meaning; nothing of this project's
kernels is used.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


@contextmanager
def installed(**modules: ModuleType) -> Iterator[None]:
    """Modules that `import` finds; others of these libraries are not there."""
    names = ("flash_attn", "flash_attn_interface", "flashinfer")
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool, window: tuple[int, int], cap: float
) -> Tensor:
    """One sequence: q [n, H, D], keys and values [s, KV, D]. Query i stands at s - n + i (bottom right)."""
    n, num_heads, _ = q.shape
    num_keys, num_kv_heads, _ = keys.shape
    out = torch.zeros_like(q)
    for i in range(n):
        place = num_keys - n + i
        first = 0 if window[0] < 0 else max(0, place - window[0])
        last = num_keys - 1 if window[1] < 0 else min(num_keys - 1, place + window[1])
        if causal:
            last = min(last, place)
        if last < first:
            continue  # a row of zeros
        for head in range(num_heads):
            group = head // (num_heads // num_kv_heads)
            scores = keys[first : last + 1, group].float() @ q[i, head].float() * scale
            if cap > 0:
                scores = cap * torch.tanh(scores / cap)
            out[i, head] = (scores.softmax(0) @ values[first : last + 1, group].float()).to(q.dtype)
    return out


def _pages(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """The first `length` keys of one sequence, out of [pages, page size, KV, D]."""
    size = cache.shape[1]
    needed = math.ceil(length / size)
    assert needed <= len(table), "the block table is too short"
    as_bytes = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
    found = as_bytes[table[:needed].long()].flatten(0, 1)[:length]
    return found.view(cache.dtype) if cache.dtype == torch.float8_e4m3fn else found


def _ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    lengths: list[int],
    tables: Tensor,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    cap: float,
) -> Tensor:
    assert starts.dtype == tables.dtype == torch.int32
    assert tables.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert int(starts[-1]) == len(q)
    parts = [q[:0]]
    for r, length in enumerate(lengths):
        own = q[int(starts[r]) : int(starts[r + 1])]
        keys, values = (_pages(cache, tables[r], length) for cache in (k, v))
        parts.append(_attend(own, keys, values, scale, causal, window, cap))
    return torch.cat(parts)


def fake_flash_attn() -> ModuleType:
    """Version 2: pages of a multiple of 256 keys, one type for all, halves."""

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        assert block_table is not None
        assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        assert q.dtype == k.dtype == v.dtype
        assert cu_seqlens_k.dtype == torch.int32
        assert cu_seqlens_k.shape == cu_seqlens_q.shape
        lengths = cu_seqlens_k.diff().tolist()
        assert cu_seqlens_q.diff().max() <= max_seqlen_q
        assert max(lengths) <= max_seqlen_k
        if max_seqlen_q == 1:  # it folds a group's heads into rows: one row for each sequence
            assert len(q) == len(lengths)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        return _ragged(q, k, v, cu_seqlens_q, lengths, block_table, scale, causal, window_size, softcap)

    return _module("flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)


def fake_flash_attn_3() -> ModuleType:
    """Version 3: pages of any size, one type for all."""

    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        qv: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k_new: Tensor | None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: Tensor | None = None,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:
        assert cache_seqlens is not None
        assert page_table is not None
        assert cu_seqlens_q is not None
        assert max_seqlen_q is not None
        assert q.dtype == k_cache.dtype == v_cache.dtype
        assert cache_seqlens.dtype == torch.int32
        assert cu_seqlens_q.diff().max() <= max_seqlen_q
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        lengths = cache_seqlens.tolist()
        tables = page_table
        return _ragged(
            q, k_cache, v_cache, cu_seqlens_q, lengths, tables, scale, causal, window_size, softcap
        )

    return _module("flash_attn_interface", flash_attn_with_kvcache=flash_attn_with_kvcache)


def fake_flashinfer() -> ModuleType:
    """The wrapper of paged prefill, not in its mode for CUDA graphs."""

    class BatchPrefillWithPagedKVCacheWrapper:
        num_plans = 0

        def __init__(
            self,
            float_workspace_buffer: Tensor,
            kv_layout: str = "NHD",
            use_cuda_graph: bool = False,
            backend: str = "auto",
        ) -> None:
            assert float_workspace_buffer.dtype == torch.uint8
            assert kv_layout == "NHD"
            assert not use_cuda_graph

        def plan(
            self,
            qo_indptr: Tensor,
            paged_kv_indptr: Tensor,
            paged_kv_indices: Tensor,
            paged_kv_last_page_len: Tensor,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim_qk: int,
            page_size: int,
            head_dim_vo: int | None = None,
            custom_mask: Tensor | None = None,
            packed_custom_mask: Tensor | None = None,
            causal: bool = False,
            pos_encoding_mode: str = "NONE",
            use_fp16_qk_reduction: bool = False,
            sm_scale: float | None = None,
            window_left: int = -1,
            logits_soft_cap: float | None = None,
            rope_scale: float | None = None,
            rope_theta: float | None = None,
            q_data_type: torch.dtype = torch.float16,
            kv_data_type: torch.dtype | None = None,
            o_data_type: torch.dtype | None = None,
        ) -> None:
            given = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
            assert all(one.dtype == torch.int32 and one.is_cpu for one in given)
            BatchPrefillWithPagedKVCacheWrapper.num_plans += 1
            num_pages = paged_kv_indptr.diff()
            assert int(paged_kv_indptr[-1]) == len(paged_kv_indices)
            assert bool((paged_kv_last_page_len[num_pages > 0] >= 1).all())
            assert bool((paged_kv_last_page_len <= page_size).all())
            self.starts, self.causal, self.cap = qo_indptr, causal, logits_soft_cap or 0.0
            lengths = (num_pages - 1).clamp(min=0) * page_size + paged_kv_last_page_len
            self.lengths: list[int] = lengths.tolist()
            self.tables = torch.zeros(len(num_pages), max(1, int(num_pages.max())), dtype=torch.int32)
            for r, (first, count) in enumerate(
                zip(paged_kv_indptr.tolist(), num_pages.tolist(), strict=False)
            ):
                self.tables[r, :count] = paged_kv_indices[first : first + count]
            self.scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
            self.window = (window_left, -1)
            self.shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
            self.types = (q_data_type, kv_data_type or q_data_type)

        def run(
            self,
            q: Tensor,
            paged_kv_cache: tuple[Tensor, Tensor],
            *args: Any,
            k_scale: float | None = None,
            v_scale: float | None = None,
            window_left: int | None = None,
        ) -> Tensor:
            k, v = paged_kv_cache
            assert (q.shape[1], k.shape[2], q.shape[2], k.shape[1]) == self.shape
            assert (q.dtype, k.dtype) == self.types
            scale = self.scale * (1.0 if k_scale is None else k_scale)
            window, cap = self.window, self.cap
            return _ragged(q, k, v, self.starts, self.lengths, self.tables, scale, self.causal, window, cap)

    return _module("flashinfer", BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper)


def _module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(content)
    return module
