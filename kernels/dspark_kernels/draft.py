"""A block drafter's pass in one call of the compiled library.

Context rows, the layers over blocks of [anchor, mask, mask, …], LM head, and for greedy requests the chain of
choices and their confidences. Ids, hidden states and logits have the bits of the same ops called one by one.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark_kernels.compiled import DraftFields, DraftNetworkFields, address
from dspark_kernels.linear import PackedLinear
from dspark_kernels.stack import LayerStack


@dataclass(frozen=True, slots=True)
class DraftNetwork:
    """The weights around a drafter's layers, in bf16."""

    fc: PackedLinear  # taps → H
    context_norm: Tensor  # [H]
    context_kv: PackedLinear  # H → K and V of every layer, side by side
    embedding: Tensor  # [V, H]
    head: PackedLinear  # H → Vd
    w1: Tensor | None  # [V, r] of the Markov head
    w2: Tensor | None  # [r, Vd]
    vocab_map: Tensor | None  # [Vd] int64 target ids
    confidence_hidden: Tensor | None  # [H] fp32; None: no confidence head
    confidence_markov: Tensor | None  # [r] fp32
    confidence_bias: float
    mask_token_id: int


@dataclass(frozen=True, slots=True)
class Drafted:
    """What a pass over R requests said of the n slots wanted of each."""

    hidden: Tensor  # [R, n, H]
    base: Tensor  # [R, n, Vd] logits before the sequential head
    token_ids: Tensor  # [R, n] int64, greedy; as the next two, empty where no chain was asked for
    previous: Tensor  # [R, n] int64, the token before each
    confidence_logits: Tensor  # [R, n] fp32; only with a confidence head


class BlockDraft:
    """Make one with `compiled_draft`. Not for several threads at once."""

    def __init__(
        self,
        stack: LayerStack,
        network: DraftNetwork,
        cos_sin: tuple[Tensor, Tensor],
        caches: tuple[Tensor, Tensor],
    ) -> None:
        matrices = [m.packed for m in (network.fc, network.context_kv, network.head)]
        confidence = (network.confidence_hidden, network.confidence_markov)
        for tensor in (network.context_norm, network.embedding, network.w1, network.w2):
            assert tensor is None or (tensor.dtype == torch.bfloat16 and tensor.is_contiguous())
        assert all(t is None or (t.dtype == torch.float32 and t.is_contiguous()) for t in confidence)
        assert network.vocab_map is None or network.vocab_map.dtype == torch.int64
        self._ops, self._out_features = stack.ops, network.head.out_features
        self._hidden, self._taps_width = network.fc.out_features, network.fc.in_features
        self._judges = network.confidence_hidden is not None
        self._kept = (stack, network, cos_sin, caches)  # whose addresses are in the fields
        self._network = DraftNetworkFields(
            *(m.fields for m in matrices if m is not None),
            network.context_norm.data_ptr(),
            network.embedding.data_ptr(),
            address(network.w1),
            address(network.w2),
            address(network.vocab_map),
            *map(address, confidence),
            network.confidence_bias,
            0 if network.w2 is None else len(network.w2),
            network.mask_token_id,
        )
        self._fields = DraftFields(network=ctypes.addressof(self._network))
        self._fields.stack = stack.fields(*cos_sin, *caches)

    def store(self, taps: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Only the context of rows: taps [N, m·H] bf16, positions and slots [N] int64."""
        self._note_context(taps, positions, slots)
        self._fields.stack.requests = 0
        self._ops.run_draft(self._fields)

    def __call__(
        self,
        context: tuple[Tensor, Tensor, Tensor] | None,
        anchors: NDArray[np.int64],
        positions: NDArray[np.int64],
        block_tables: NDArray[np.int32],
        kv_len: NDArray[np.int32],
        kv_block_size: int,
        *,
        block: int,
        wanted: int,
        greedy: bool,
    ) -> Drafted:
        """Stores `context`, as `store` does, and drafts for R requests in blocks of `block` slots, whose last
        `wanted` predict.

        anchors and their positions [R]; of each request's context, the blocks [R, ≥ 1] and the length [R].
        `greedy`: the chain of likeliest tokens is wanted, too.
        """
        num_requests = len(anchors)
        shape = (num_requests, wanted)
        hidden = torch.empty((*shape, self._hidden), dtype=torch.bfloat16)
        base = torch.empty((*shape, self._out_features), dtype=torch.bfloat16)
        chained = shape if greedy else (0, wanted)
        token_ids, previous = torch.empty((2, *chained), dtype=torch.int64)
        confidence = torch.empty(chained if self._judges else (0, wanted), dtype=torch.float32)
        fields = self._fields
        if context is None:
            fields.context_rows = 0
        else:
            self._note_context(*context)
        blocks = fields.stack
        blocks.kv_len, blocks.block_tables = kv_len.ctypes.data, block_tables.ctypes.data
        blocks.table_stride, blocks.block_size = block_tables.shape[1], kv_block_size
        blocks.requests = num_requests
        fields.block, fields.wanted = block, wanted
        fields.anchors, fields.anchor_positions = anchors.ctypes.data, positions.ctypes.data
        fields.hidden, fields.base = hidden.data_ptr(), base.data_ptr()
        fields.ids = token_ids.data_ptr() if greedy else None
        fields.previous, fields.confidence = previous.data_ptr(), confidence.data_ptr()
        self._ops.run_draft(fields)
        return Drafted(hidden, base, token_ids, previous, confidence)

    def _note_context(self, taps: Tensor, positions: Tensor, slots: Tensor) -> None:
        assert taps.dtype == torch.bfloat16
        assert taps.shape[1] == self._taps_width
        assert positions.dtype == slots.dtype == torch.int64
        assert taps.is_contiguous()
        assert positions.is_contiguous()
        assert slots.is_contiguous()
        fields = self._fields
        fields.taps, fields.context_rows = taps.data_ptr(), len(taps)
        fields.context_positions, fields.context_slots = positions.data_ptr(), slots.data_ptr()


def compiled_draft(
    stack: LayerStack,
    network: DraftNetwork,
    cos_sin: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
) -> BlockDraft | None:
    """The pass as one call; None where the compiled library does not carry it: call the ops one by one then.

    cos and sin [any position, D/2] fp32; the drafter's K and V [L, S, KV, D].
    """
    matrices = (network.fc, network.context_kv, network.head)
    if any(matrix.packed is None for matrix in matrices):
        return None
    return BlockDraft(stack, network, cos_sin, caches)
