"""A linear layer whose weight is stored in the layout the CPU's matrix multiply wants."""

import torch
import torch.nn.functional as F
from torch import Tensor

PACK_ROWS = 32  # row count the layout is chosen for


class PackedLinear:
    """x @ weight.T + bias for inference. On a CPU in bf16 the weight is reordered once by oneDNN; elsewhere
    F.linear.

    Keeps only the reordered weight: drop the original to save its memory. weight [out, in], bias [out] or
    None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed = _can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] → [N, out]."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return F.linear(x, self._weight, self.bias)


def _can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has this layout here; fp32 gains nothing from it."""
    if (
        weight.device.type != "cpu"
        or weight.dtype != torch.bfloat16
        or not torch.backends.mkldnn.is_available()
    ):
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    )
