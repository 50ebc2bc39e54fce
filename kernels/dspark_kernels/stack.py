"""Decoder layers, one after the other, in one call of the compiled library.

Attention over paged KV and a SwiGLU MLP, RMSNorm before each, as in the Llama family. The bits are those of
the same ops called one by one.
"""

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dspark_kernels.attention import PagedBatch
from dspark_kernels.compiled import LayerFields, StackFields, address
from dspark_kernels.cpu_ops import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM, CpuOps
from dspark_kernels.dispatch import cpu_version
from dspark_kernels.linear import Fp8Linear, Int8Linear, PackedLinear

Linear = PackedLinear | Int8Linear | Fp8Linear


class Layer(Protocol):
    """The weights of one layer; those that are read together are stored together."""

    @property
    def qkv(self) -> Linear: ...
    @property
    def o(self) -> Linear: ...
    @property
    def gate_up(self) -> Linear: ...
    @property
    def down(self) -> Linear: ...
    @property
    def q_norm(self) -> Tensor | None: ...  # [D]
    @property
    def k_norm(self) -> Tensor | None: ...  # [D]
    @property
    def input_norm(self) -> Tensor: ...  # [H]
    @property
    def post_norm(self) -> Tensor: ...  # [H]


class LayerStack:
    """Layers that share shapes, and the norm after the last of them. Make one with `compiled_stack`."""

    def __init__(
        self,
        ops: CpuOps,
        layers: Sequence[Layer],
        final_norm: Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
    ) -> None:
        self.ops = ops
        self._num_heads, self._num_kv_heads, self._head_dim, self._eps = (
            num_heads,
            num_kv_heads,
            head_dim,
            eps,
        )
        self._hidden = len(final_norm)
        next_norms = [*(layer.input_norm for layer in layers[1:]), final_norm]
        self._first_norm = layers[0].input_norm
        self._kept = (list(layers), final_norm)  # whose addresses are in the fields
        self._fields = (LayerFields * len(layers))(
            *(_fields(layer, norm) for layer, norm in zip(layers, next_norms, strict=True))
        )
        self._tap_at: dict[tuple[int, ...], Tensor] = {}

    def __call__(
        self,
        x: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        k_cache: Tensor,
        v_cache: Tensor,
        batch: PagedBatch,
        *,
        slots: Tensor | None,
        taps: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor]:
        """x [N, H] through all layers: the final norm's output [N, H], and those of the layers `taps` side by
        side [N, len(taps) · H].

        cos and sin [N, D/2] fp32; k_cache and v_cache [L, S, KV, D]. The rows' keys and values go to `slots`
        [N] and attention is causal; without slots the rows of each request are a block that sees its `kv_len`
        cached keys and itself, both ways.
        """
        residual = x.clone(memory_format=torch.contiguous_format)
        normed = torch.empty_like(residual)
        rows = len(residual)
        kept = residual.new_empty((rows, len(taps) * self._hidden))
        cos, sin = (table.contiguous() for table in cos_sin)
        assert residual.dtype == torch.bfloat16
        assert slots is None or slots.dtype == torch.int64
        fields = self.fields(cos, sin, k_cache, v_cache)
        fields.residual, fields.normed, fields.rows = residual.data_ptr(), normed.data_ptr(), rows
        fields.taps, fields.taps_width = kept.data_ptr(), kept.shape[1]
        fields.tap_at = self._tap_columns(taps).data_ptr()
        fields.slots = address(slots)
        fields.query_start, fields.kv_len = batch.query_start.data_ptr(), batch.kv_len.data_ptr()
        fields.block_tables, fields.table_stride = batch.block_tables.data_ptr(), batch.block_tables.stride(0)
        fields.block_size, fields.requests = batch.block_size, len(batch.kv_len)
        self.ops.run_stack(fields)
        return normed, kept

    def fields(self, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor) -> StackFields:
        """What the compiled library is given, without the batch. All tensors must outlive it."""
        assert k_cache.dtype == v_cache.dtype == torch.bfloat16
        assert k_cache.is_contiguous()
        assert v_cache.is_contiguous()
        assert cos.dtype == sin.dtype == torch.float32
        return StackFields(
            layers=ctypes.addressof(self._fields),
            num_layers=len(self._fields),
            first_norm=self._first_norm.data_ptr(),
            tap_at=self._tap_columns(()).data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            k_cache=k_cache.data_ptr(),
            v_cache=v_cache.data_ptr(),
            cache_layer_stride=k_cache.stride(0),
            hidden=self._hidden,
            heads=self._num_heads,
            kv_heads=self._num_kv_heads,
            dim=self._head_dim,
            scale=self._head_dim**-0.5,
            eps=self._eps,
        )

    def _tap_columns(self, taps: tuple[int, ...]) -> Tensor:
        """[L] where each layer's output starts in a row of taps; -1: not kept."""
        if taps not in self._tap_at:
            at = torch.full((len(self._fields),), -1)
            for place, layer in enumerate(taps):
                at[layer] = place * self._hidden
            self._tap_at[taps] = at
        return self._tap_at[taps]


def compiled_stack(
    layers: Sequence[Layer],
    final_norm: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
) -> LayerStack | None:
    """The layers as one call; None where the compiled library does not carry them (other types than bf16,
    CPUs without AVX-512 BF16, odd sizes): call them one by one then."""
    if not final_norm.is_cpu:
        return None
    ops = cpu_version()
    matrices = [m.packed for layer in layers for m in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    carried = head_dim % HEAD_DIM_MULTIPLE == 0 and head_dim <= MAX_HEAD_DIM
    if not isinstance(ops, CpuOps) or not carried or not all(matrices) or final_norm.dtype != torch.bfloat16:
        return None
    return LayerStack(
        ops, layers, final_norm, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, eps=eps
    )


def _fields(layer: Layer, next_norm: Tensor) -> LayerFields:
    norms = (layer.q_norm, layer.k_norm, layer.post_norm, next_norm)
    for norm in norms:
        assert norm is None or (norm.dtype == torch.bfloat16 and norm.is_contiguous())
    matrices = [m.packed for m in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    return LayerFields(*(m.fields for m in matrices if m is not None), *(address(norm) for norm in norms))
