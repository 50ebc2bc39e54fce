"""What the compiled library is given by address: packed matrices and layers, mirrored from csrc/."""

import ctypes

from torch import Tensor

_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class MatrixFields(ctypes.Structure):
    """`Matrix` of csrc/matrix.h."""

    _fields_ = [
        ("panels", _POINTER), ("scales", _POINTER), ("bias", _POINTER),
        ("in_features", _LONG), ("out_features", _LONG),
    ]  # fmt: skip


class LayerFields(ctypes.Structure):
    """`stack::Layer` of csrc/stack.h."""

    _fields_ = [
        ("qkv", MatrixFields), ("o", MatrixFields), ("gate_up", MatrixFields), ("down", MatrixFields),
        ("q_norm", _POINTER), ("k_norm", _POINTER), ("post_norm", _POINTER), ("next_norm", _POINTER),
    ]  # fmt: skip


class StackFields(ctypes.Structure):
    """`stack::Args` of csrc/stack.h."""

    _fields_ = [
        ("layers", _POINTER), ("num_layers", _LONG), ("first_norm", _POINTER),
        ("residual", _POINTER), ("normed", _POINTER),
        ("taps", _POINTER), ("tap_at", _POINTER), ("taps_width", _LONG),
        ("cos", _POINTER), ("sin", _POINTER), ("positions", _POINTER),
        ("k_cache", _POINTER), ("v_cache", _POINTER), ("cache_layer_stride", _LONG),
        ("slots", _POINTER),
        ("query_start", _POINTER), ("kv_len", _POINTER), ("block_tables", _POINTER),
        ("table_stride", _LONG), ("block_size", _LONG), ("requests", _LONG),
        ("rows", _LONG), ("hidden", _LONG), ("heads", _LONG), ("kv_heads", _LONG), ("dim", _LONG),
        ("scale", _FLOAT), ("eps", _FLOAT),
    ]  # fmt: skip


class DraftNetworkFields(ctypes.Structure):
    """`draft::Network` of csrc/draft.h."""

    _fields_ = [
        ("fc", MatrixFields), ("context_kv", MatrixFields), ("head", MatrixFields),
        ("context_norm", _POINTER), ("embedding", _POINTER),
        ("w1", _POINTER), ("w2", _POINTER), ("vocab_map", _POINTER),
        ("confidence_hidden", _POINTER), ("confidence_markov", _POINTER), ("confidence_bias", _FLOAT),
        ("rank", _LONG), ("mask_token", _LONG),
    ]  # fmt: skip


class DraftFields(ctypes.Structure):
    """`draft::Args` of csrc/draft.h."""

    _fields_ = [
        ("network", _POINTER),
        ("taps", _POINTER), ("context_positions", _POINTER), ("context_slots", _POINTER),
        ("context_rows", _LONG),
        ("stack", StackFields),
        ("block", _LONG), ("wanted", _LONG),
        ("anchors", _POINTER), ("anchor_positions", _POINTER),
        ("hidden", _POINTER), ("base", _POINTER),
        ("ids", _POINTER), ("previous", _POINTER), ("confidence", _POINTER),
    ]  # fmt: skip


class AcceptFields(ctypes.Structure):
    """`sampling::Drafts` of csrc/sampling.h."""

    _fields_ = [
        ("probs", _POINTER), ("drafted", _POINTER), ("row_start", _POINTER),
        ("uniforms", _POINTER), ("keys", _POINTER),
        ("draft_probs", _POINTER), ("one_hot", _POINTER), ("vocab_map", _POINTER), ("draft_ids", _POINTER),
        ("requests", _LONG), ("vocab", _LONG), ("draft_vocab", _LONG),
        ("counts", _POINTER), ("tokens", _POINTER),
    ]  # fmt: skip


class PackedMatrix:
    """A weight [out, in] in panels. Holds the tensors whose addresses `fields` has."""

    def __init__(self, panels: Tensor, scales: Tensor | None, bias: Tensor, out_features: int) -> None:
        self.in_features, self.out_features = panels.shape[1], out_features
        self._tensors = (panels, scales, bias)
        self.fields = MatrixFields(
            panels.data_ptr(), address(scales), bias.data_ptr(), self.in_features, out_features
        )


def address(tensor: Tensor | None) -> int | None:
    """Where its data is; None, a null pointer, for None."""
    return None if tensor is None else tensor.data_ptr()
