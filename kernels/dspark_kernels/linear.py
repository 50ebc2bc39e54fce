"""A linear layer whose weight is stored in the layout that the CPU's matrix multiply wants."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_kernels.cpu_ops import CpuOps
from dspark_kernels.dispatch import cpu_version

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
        self._multiply = _compiled(weight, bias) or _onednn(weight, bias) or _plain(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] → [N, out]."""
        return self._multiply(x)


def _compiled(weight: Tensor, bias: Tensor | None) -> Multiply | None:
    if not weight.is_cpu or weight.dtype != torch.bfloat16 or weight.shape[1] % 2:
        return None
    ops, out_features = cpu_version(), weight.shape[0]
    if not isinstance(ops, CpuOps) or not ops.has_linear:
        return None
    panels, bias32 = ops.pack_linear(weight, bias)
    return lambda x: ops.linear(x, panels, bias32, out_features)


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
