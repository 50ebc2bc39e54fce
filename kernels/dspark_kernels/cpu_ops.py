"""The compiled CPU versions of the ops (csrc/), called through ctypes, which releases the GIL for the call.

Same arguments and results as `torch_ops`. Shapes the compiled code does not carry (head sizes that are no
multiple of 32, types mixed in one call) go to the reference.
"""

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dspark_kernels import huge_pages, torch_ops
from dspark_kernels.compiled import (
    AcceptFields,
    DraftFields,
    MatrixFields,
    PackedMatrix,
    StackFields,
    address,
)

if TYPE_CHECKING:
    from dspark_kernels.attention import PagedBatch

TYPES = {torch.float32: 0, torch.bfloat16: 1}  # the code of each supported type in csrc/cpu_ops.cpp
HEAD_DIM_MULTIPLE = 32  # two of the widest vectors: RoPE rotates halves, bf16 attention multiplies pairs
MAX_HEAD_DIM = 1024  # MAX_DIM of csrc/attention.h

LINEAR_PANEL = 32  # outputs are padded to this, see csrc/linear.h

_INT, _LONG, _FLOAT, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


def _bind(library: ctypes.CDLL, name: str, *argument_types: type) -> "ctypes._NamedFuncPointer":
    function = library[name]
    function.argtypes = argument_types
    function.restype = None
    return function


class CpuOps:
    """The ops over one loaded library. Thread-safe: scratch memory is per thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._norm = _bind(library, "dspark_rms_norm", _INT, *[_POINTER] * 5, _LONG, _LONG, _FLOAT, _INT)
        self._silu = _bind(library, "dspark_silu_mul", _INT, _POINTER, _POINTER, _LONG, _LONG, _INT)
        self._rope = _bind(library, "dspark_rope", _INT, *[_POINTER] * 9, *[_LONG] * 6, _FLOAT, _INT)
        self._attention = _bind(
            library, "dspark_attention", _INT, *[_POINTER] * 9, *[_LONG] * 8, _FLOAT, _LONG, _INT
        )
        self._argmax = _bind(library, "dspark_argmax", _INT, _POINTER, _POINTER, _LONG, _LONG, _INT)
        self._noisy = _bind(library, "dspark_noisy_argmax", *[_POINTER] * 4, _LONG, _LONG, _INT)
        self._markov = _bind(library, "dspark_markov_logits", _INT, *[_POINTER] * 5, *[_LONG] * 3, _INT)
        self._filter = _bind(library, "dspark_filtered_probs", _INT, *[_POINTER] * 6, _LONG, _LONG, _INT)
        self._accept = _bind(library, "dspark_accept", ctypes.POINTER(AcceptFields), _INT)
        self._draw = _bind(library, "dspark_inverse_cdf", *[_POINTER] * 3, _LONG, _LONG, _INT)
        self._chain = _bind(library, "dspark_markov_chain", _INT, *[_POINTER] * 7, *[_LONG] * 4, _INT)

        library.dspark_has_linear.restype = _INT
        self.has_linear = bool(library.dspark_has_linear())
        self._pack = _bind(library, "dspark_pack_linear", _POINTER, _LONG, _LONG, _POINTER)
        self._linear = _bind(
            library, "dspark_linear", ctypes.POINTER(MatrixFields), _POINTER, _POINTER, _LONG, _INT
        )
        self._stack = _bind(library, "dspark_stack", ctypes.POINTER(StackFields), _INT)
        self._draft = _bind(library, "dspark_draft", ctypes.POINTER(DraftFields), _INT)

    # A batch of these is small on a CPU: torch is fast enough.
    leading_matches = staticmethod(torch_ops.leading_matches)
    survival_lengths = staticmethod(torch_ops.survival_lengths)
    scaled_linear = staticmethod(torch_ops.scaled_linear)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.dtype != x.dtype:
            return torch_ops.rms_norm(x, weight, eps)
        x, weight = x.contiguous(), weight.contiguous()
        out = torch.empty_like(x)
        rows, size = x.shape
        self._norm(
            TYPES[x.dtype],
            out.data_ptr(),
            None,
            x.data_ptr(),
            None,
            weight.data_ptr(),
            rows,
            size,
            eps,
            torch.get_num_threads(),
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if weight.dtype != x.dtype or residual.dtype != x.dtype:
            return torch_ops.add_rms_norm(x, residual, weight, eps)
        x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
        out, total = torch.empty_like(x), torch.empty_like(x)
        rows, size = x.shape
        self._norm(
            TYPES[x.dtype],
            out.data_ptr(),
            total.data_ptr(),
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            rows,
            size,
            eps,
            torch.get_num_threads(),
        )
        return out, total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape
        out = gate_up.new_empty((rows, width // 2))
        self._silu(
            TYPES[gate_up.dtype],
            out.data_ptr(),
            gate_up.data_ptr(),
            rows,
            width // 2,
            torch.get_num_threads(),
        )
        return out

    def argmax(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty(len(x), dtype=torch.int64)
        self._argmax(TYPES[x.dtype], out.data_ptr(), x.data_ptr(), *x.shape, torch.get_num_threads())
        return out

    def noisy_argmax(self, probs: Tensor, keys: Tensor, ids: Tensor | None) -> Tensor:
        assert keys.dtype == torch.int64
        assert ids is None or ids.dtype == torch.int64
        if probs.dtype != torch.float32:
            return torch_ops.noisy_argmax(probs, keys, ids)
        probs, keys = probs.contiguous(), keys.contiguous()
        out = torch.empty(len(probs), dtype=torch.int64)
        self._noisy(
            out.data_ptr(),
            probs.data_ptr(),
            keys.data_ptr(),
            None if ids is None else ids.contiguous().data_ptr(),
            *probs.shape,
            torch.get_num_threads(),
        )
        return out

    def filtered_probs(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor | None,
        top_p: Tensor | None,
        min_p: Tensor | None,
    ) -> Tensor:
        columns = (temperature, top_p, min_p)
        if any(column is not None and column.dtype != torch.float32 for column in columns):
            return torch_ops.filtered_probs(logits, temperature, top_k, top_p, min_p)
        assert top_k is None or top_k.dtype == torch.int64
        logits = logits.contiguous()
        rows, size = logits.shape
        kept = [None if c is None else c.contiguous() for c in (temperature, top_k, top_p, min_p)]
        assert all(column is None or column.numel() == rows for column in kept)
        out = torch.empty((rows, size), dtype=torch.float32)
        self._filter(
            TYPES[logits.dtype],
            out.data_ptr(),
            logits.data_ptr(),
            *map(address, kept),
            rows,
            size,
            torch.get_num_threads(),
        )
        return out

    def accept(
        self,
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
        if probs.dtype != torch.float32 or (draft_probs is not None and draft_probs.dtype != torch.float32):
            return torch_ops.accept(
                probs, drafted, row_start, most, uniforms, keys, draft_probs, one_hot, vocab_map, draft_ids
            )
        assert drafted.dtype == keys.dtype == torch.int64
        assert row_start.dtype == torch.int32
        assert uniforms.dtype == torch.float64
        assert one_hot is None or one_hot.dtype == torch.bool
        kept = [
            None if tensor is None else tensor.contiguous()
            for tensor in (
                *(probs, drafted, row_start, uniforms, keys),
                *(draft_probs, one_hot, vocab_map, draft_ids),
            )
        ]
        counts, tokens = torch.empty((2, len(keys)), dtype=torch.int64)
        fields = AcceptFields(
            *map(address, kept),
            len(keys),
            probs.shape[1],
            0 if draft_probs is None else draft_probs.shape[1],
            counts.data_ptr(),
            tokens.data_ptr(),
        )
        self._accept(fields, torch.get_num_threads())
        return counts, tokens

    def inverse_cdf(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        if weights.dtype != torch.float32 or uniforms.dtype != torch.float64:
            return torch_ops.inverse_cdf(weights, uniforms)
        weights, uniforms = weights.contiguous(), uniforms.contiguous()
        out = torch.empty(len(weights), dtype=torch.int64)
        self._draw(
            out.data_ptr(),
            weights.data_ptr(),
            uniforms.data_ptr(),
            *weights.shape,
            torch.get_num_threads(),
        )
        return out

    def markov_logits(self, base: Tensor, w1: Tensor, w2: Tensor, previous: Tensor) -> Tensor:
        if not base.dtype == w1.dtype == w2.dtype:
            return torch_ops.markov_logits(base, w1, w2, previous)
        base = base.contiguous()
        out = torch.empty(base.shape, dtype=torch.float32)
        self._markov(
            TYPES[base.dtype],
            out.data_ptr(),
            base.data_ptr(),
            w1.data_ptr(),
            w2.data_ptr(),
            previous.data_ptr(),
            len(base),
            w2.shape[0],
            base.shape[1],
            torch.get_num_threads(),
        )
        return out

    def markov_chain(
        self, base: Tensor, w1: Tensor, w2: Tensor, anchors: Tensor, vocab_map: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if not base.dtype == w1.dtype == w2.dtype:
            return torch_ops.markov_chain(base, w1, w2, anchors, vocab_map)
        base = base.contiguous()
        requests, slots, vocab = base.shape
        ids, previous = torch.empty((2, requests, slots), dtype=torch.int64)
        self._chain(
            TYPES[base.dtype],
            ids.data_ptr(),
            previous.data_ptr(),
            base.data_ptr(),
            w1.data_ptr(),
            w2.data_ptr(),
            anchors.data_ptr(),
            None if vocab_map is None else vocab_map.data_ptr(),
            requests,
            slots,
            w2.shape[0],
            vocab,
            torch.get_num_threads(),
        )
        return ids, previous

    def qkv_rope(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        num_heads: int,
        num_kv_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = qkv.shape[0]
        dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
        q = qkv.new_empty((rows, num_heads, dim))
        k, v = qkv.new_empty((rows, num_kv_heads, dim)), qkv.new_empty((rows, num_kv_heads, dim))
        if not (_carries(qkv, dim, k, v) and _norms_carried(qkv, q_norm, k_norm)):
            return torch_ops.qkv_rope(qkv, cos, sin, num_heads, num_kv_heads, q_norm, k_norm, eps)
        self._rotate(qkv, cos, sin, q, num_heads, num_kv_heads, q_norm, k_norm, eps, k, v, None)
        return q, k, v

    def qkv_rope_store(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        num_heads: int,
        num_kv_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Tensor:
        dim = k_cache.shape[2]
        if not (_carries(qkv, dim, k_cache, v_cache) and _norms_carried(qkv, q_norm, k_norm)):
            return torch_ops.qkv_rope_store(
                qkv,
                cos,
                sin,
                num_heads,
                num_kv_heads,
                q_norm,
                k_norm,
                eps,
                k_cache,
                v_cache,
                slots,
                k_scale,
                v_scale,
            )
        q = qkv.new_empty((qkv.shape[0], num_heads, dim))
        self._rotate(qkv, cos, sin, q, num_heads, num_kv_heads, q_norm, k_norm, eps, k_cache, v_cache, slots)
        return q

    def k_rope_store(
        self,
        kv: Tensor,
        cos: Tensor,
        sin: Tensor,
        num_kv_heads: int,
        k_norm: Tensor | None,
        eps: float,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
    ) -> None:
        if not (_carries(kv, k_cache.shape[2], k_cache, v_cache) and _norms_carried(kv, k_norm)):
            torch_ops.k_rope_store(kv, cos, sin, num_kv_heads, k_norm, eps, k_cache, v_cache, slots)
            return
        self._rotate(kv, cos, sin, None, 0, num_kv_heads, None, k_norm, eps, k_cache, v_cache, slots)

    def _rotate(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        q: Tensor | None,
        num_heads: int,
        num_kv_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        k: Tensor,
        v: Tensor,
        slots: Tensor | None,
    ) -> None:
        """`slots` None: k and v hold one row per input row."""
        assert cos.dtype == sin.dtype == torch.float32
        assert slots is None or slots.dtype == torch.int64
        qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
        self._rope(
            TYPES[qkv.dtype],
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            None if q is None else q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            None if slots is None else slots.data_ptr(),
            qkv.shape[0],
            num_heads,
            num_kv_heads,
            k.shape[2],
            k.stride(0),
            v.stride(0),
            eps,
            torch.get_num_threads(),
        )

    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedMatrix:
        """weight [out, in] bf16, `in` even → its panels, for `multiply`."""
        assert self.has_linear
        out_features, in_features = weight.shape
        panels = huge_pages.empty((_padded(out_features), in_features), weight.dtype)
        weight = weight.contiguous()
        self._pack(weight.data_ptr(), out_features, in_features, panels.data_ptr())
        return PackedMatrix(panels, None, _padded_bias(out_features, bias), out_features)

    def pack_int8(self, quantized: Tensor, scales: Tensor, bias: Tensor | None) -> PackedMatrix:
        """quantized [out, in] int8, `in` even, scales [out] fp32 → panels of the bf16 weights q · scale."""
        assert self.has_linear
        out_features, in_features = quantized.shape
        padded = _padded(out_features)
        rows = torch.zeros(padded, in_features, dtype=torch.int8)
        rows[:out_features] = quantized
        panels = huge_pages.empty((padded, in_features), torch.int8)
        pairs = rows.view(padded // LINEAR_PANEL, LINEAR_PANEL, in_features // 2, 2).transpose(1, 2)
        panels.view(pairs.shape).copy_(pairs)
        padded_scales = torch.zeros(padded)
        padded_scales[:out_features] = scales
        return PackedMatrix(
            panels, padded_scales.repeat_interleave(2), _padded_bias(out_features, bias), out_features
        )

    def multiply(self, x: Tensor, matrix: PackedMatrix) -> Tensor:
        """x [N, in] bf16 → [N, out]."""
        x = x.contiguous()
        assert x.dtype == torch.bfloat16
        assert x.shape[1] == matrix.in_features
        out = x.new_empty((len(x), matrix.out_features))
        self._linear(matrix.fields, x.data_ptr(), out.data_ptr(), len(x), torch.get_num_threads())
        return out

    def run_stack(self, fields: StackFields) -> None:
        """stack.py says what it does."""
        self._stack(fields, torch.get_num_threads())

    def run_draft(self, fields: DraftFields) -> None:
        """draft.py says what it does."""
        self._draft(fields, torch.get_num_threads())

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: "PagedBatch",
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        if not _carries(q, q.shape[2], k_cache, v_cache) or soft_cap is not None:
            return torch_ops.paged_attention(q, k_cache, v_cache, batch, scale, window, soft_cap)
        return self._attend(q, None, None, k_cache, v_cache, batch, scale, window)

    def block_attention(
        self,
        q: Tensor,
        k_block: Tensor,
        v_block: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: "PagedBatch",
        scale: float,
    ) -> Tensor:
        if not _carries(q, q.shape[2], k_cache, v_cache) or not q.dtype == k_block.dtype == v_block.dtype:
            return torch_ops.block_attention(q, k_block, v_block, k_cache, v_cache, batch, scale)
        return self._attend(q, k_block.contiguous(), v_block.contiguous(), k_cache, v_cache, batch, scale)

    def _attend(
        self,
        q: Tensor,
        k_block: Tensor | None,
        v_block: Tensor | None,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: "PagedBatch",
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        assert scale > 0
        q = q.contiguous()
        out = torch.empty_like(q)
        tables = batch.block_tables
        self._attention(
            TYPES[q.dtype],
            q.data_ptr(),
            None if k_block is None else k_block.data_ptr(),
            None if v_block is None else v_block.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            out.data_ptr(),
            batch.query_start.data_ptr(),
            batch.kv_len.data_ptr(),
            tables.data_ptr(),
            tables.stride(0),
            tables.shape[0],
            q.shape[1],
            k_cache.shape[1],
            q.shape[2],
            batch.block_size,
            k_cache.stride(0),
            v_cache.stride(0),
            scale,
            window or 0,
            torch.get_num_threads(),
        )
        return out


def _padded(out_features: int) -> int:
    return -(-out_features // LINEAR_PANEL) * LINEAR_PANEL


def _padded_bias(out_features: int, bias: Tensor | None) -> Tensor:
    padded = torch.zeros(_padded(out_features))
    if bias is not None:
        padded[:out_features] = bias
    return padded


def _carries(x: Tensor, dim: int, k: Tensor, v: Tensor) -> bool:
    """Whether the compiled code takes these: one type, whole vectors per head, a row's heads side by side."""
    return (
        dim % HEAD_DIM_MULTIPLE == 0
        and dim <= MAX_HEAD_DIM
        and x.dtype == k.dtype == v.dtype
        and k.stride()[1:] == v.stride()[1:] == (dim, 1)
    )


def _norms_carried(x: Tensor, *weights: Tensor | None) -> bool:
    return all(w is None or (w.dtype == x.dtype and w.is_contiguous()) for w in weights)
