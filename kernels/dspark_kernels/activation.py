"""The gate of a SwiGLU feed-forward."""

from torch import Tensor

from dspark_kernels.dispatch import ops_for


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up for a projection that holds both side by side (Shazeer 2020, SwiGLU).

    gate_up [N, 2I], the gate in the first I columns → [N, I]. Rounded once, at the end.
    """
    return ops_for(gate_up).silu_mul(gate_up)
