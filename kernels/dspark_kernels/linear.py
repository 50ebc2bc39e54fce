"""A linear layer whose weight is stored in the layout that the CPU's matrix multiply wants."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_kernels.compiled import PackedMatrix
from dspark_kernels.cpu_ops import CpuOps
from dspark_kernels.dispatch import cpu_version, ops_for

Multiply = Callable[[Tensor], Tensor]
# oneDNN chooses its layout for a number of rows; from 1 to 256 it chose the same one.
ONEDNN_ROWS = 32


class PackedLinear:
    """x @ weight.T + bias, for inference. weight [out, in], bias [out] or None.

    In bf16 on a CPU the weight is laid out anew, once: by the compiled version where the CPU has AVX-512 BF16
    or AMX, else by oneDNN. Everywhere else it is F.linear. Only one layout is kept: drop the original weight
    to save its memory.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.packed = _packed(weight, bias)  # None: not by the compiled version
        self._multiply = _compiled(self.packed) or _onednn(weight, bias) or _plain(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] → [N, out]."""
        return self._multiply(x)


class Int8Linear:
    """x @ weight.T + bias with the weight kept in int8: half the bytes to read, and an approximation.

    Each output has its own scale: q = round(w · 127 / max|w|), rounded to even at ties. On a CPU, what is
    computed is exactly `PackedLinear` of the bf16 weights q · scale, also where the compiled version is not
    to be had and those weights are kept instead; elsewhere the scale is applied to the product. `largest`
    [out]: max|w|, of a weight that is some columns of a larger one.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, largest: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        quantized, scales = quantize_int8(weight, largest)
        self.packed = _packed_int8(quantized, scales, bias) if weight.dtype == torch.bfloat16 else None
        self._multiply = _compiled(self.packed) or _eight_bits(quantized, scales, bias, weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] → [N, out]."""
        return self._multiply(x)


class Fp8Linear:
    """As `Int8Linear`, in float8 (e4m3): q = w · 448 / max|w|, to the nearest. A CPU keeps q · scale."""

    packed: PackedMatrix | None = None

    def __init__(self, weight: Tensor, bias: Tensor | None = None, largest: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        quantized, scales = quantize_fp8(weight, largest)
        self._multiply = _eight_bits(quantized, scales, bias, weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] → [N, out]."""
        return self._multiply(x)


def quantize_int8(weight: Tensor, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """weight [out, in] → (int8 [out, in], scales [out] fp32), symmetric, one scale an output."""
    steps, scales = _in_steps(weight, largest, 127.0)
    return steps.round().to(torch.int8), scales


def quantize_fp8(weight: Tensor, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """weight [out, in] → (float8_e4m3fn [out, in], scales [out] fp32), one scale an output."""
    steps, scales = _in_steps(weight, largest, torch.finfo(torch.float8_e4m3fn).max)
    return steps.to(torch.float8_e4m3fn), scales


def _in_steps(weight: Tensor, largest: Tensor | None, most: float) -> tuple[Tensor, Tensor]:
    weight = weight.float()
    scales = (weight.abs().amax(dim=1) if largest is None else largest) / most
    return weight / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1), scales


def _eight_bits(quantized: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Multiply:
    if quantized.is_cpu:
        return PackedLinear((quantized.float() * scales.unsqueeze(1)).to(dtype), bias)
    return lambda x: ops_for(x).scaled_linear(x, quantized, scales, bias)


def _compiled(matrix: PackedMatrix | None) -> Multiply | None:
    if matrix is None:
        return None
    ops = cpu_version()
    return (lambda x: ops.multiply(x, matrix)) if isinstance(ops, CpuOps) else None


def _packed(weight: Tensor, bias: Tensor | None) -> PackedMatrix | None:
    if not weight.is_cpu or weight.dtype != torch.bfloat16 or weight.shape[1] % 2:
        return None
    ops = cpu_version()
    return ops.pack(weight, bias) if isinstance(ops, CpuOps) and ops.has_linear else None


def _packed_int8(quantized: Tensor, scales: Tensor, bias: Tensor | None) -> PackedMatrix | None:
    if not quantized.is_cpu or quantized.shape[1] % 2:
        return None
    ops = cpu_version()
    if not isinstance(ops, CpuOps) or not ops.has_linear:
        return None
    return ops.pack_int8(quantized, scales, bias)


def _onednn(weight: Tensor, bias: Tensor | None) -> Multiply | None:
    if not weight.is_cpu or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return None
    onednn = torch.ops.mkldnn
    if not onednn._is_mkldnn_bf16_supported() or not hasattr(onednn, "_linear_pointwise"):
        return None
    packed = onednn._reorder_linear_weight(weight, ONEDNN_ROWS)
    return lambda x: onednn._linear_pointwise(x, packed, bias, "none", [], "")


def _plain(weight: Tensor, bias: Tensor | None) -> Multiply:
    return lambda x: F.linear(x, weight, bias)
