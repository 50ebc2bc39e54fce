"""RMSNorm, alone and fused with the residual addition before it."""

from torch import Tensor

from dspark_kernels.dispatch import ops_for


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension (Zhang & Sennrich 2019, eq. 4).

    x [N, H], weight [H] → [N, H]. The statistics are fp32; the normalised value is rounded to x's type before
    it is scaled.
    """
    return ops_for(x, weight).rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual): what every decoder layer does between its two halves.

    x, residual [N, H], weight [H] → [N, H] twice. The norm sees the sum as rounded to x's type.
    """
    return ops_for(x, weight).add_rms_norm(x, residual, weight, eps)
