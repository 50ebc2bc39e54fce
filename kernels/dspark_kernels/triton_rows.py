"""Triton: RMSNorm, alone and with the residual addition, and the gate of a SwiGLU. One program a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels import torch_ops

GATE_TILE = 1024  # columns of one program


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if weight.dtype != x.dtype:
        return torch_ops.rms_norm(x, weight, eps)
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    rows, size = x.shape
    if rows:
        _norm_kernel[(rows,)](out, out, x, x, weight, size, eps, **_row_tile(size), ADD=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if weight.dtype != x.dtype or residual.dtype != x.dtype:
        return torch_ops.add_rms_norm(x, residual, weight, eps)
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    rows, size = x.shape
    if rows:
        _norm_kernel[(rows,)](out, total, x, residual, weight, size, eps, **_row_tile(size), ADD=True)
    return out, total


def silu_mul(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape
    size = width // 2
    out = gate_up.new_empty((rows, size))
    if rows:
        _gate_kernel[(rows, triton.cdiv(size, GATE_TILE))](out, gate_up, size, TILE=GATE_TILE)
    return out


def _row_tile(size: int) -> dict[str, int]:
    """A whole row in one tile, and warps for it."""
    tile = triton.next_power_of_2(size)
    return {"TILE": tile, "num_warps": min(16, max(1, tile // 256))}


@triton.jit
def _norm_kernel(out, total, x, residual, weight, size, eps, TILE: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, TILE)
    inside = column < size
    value = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:  # the norm sees the sum as it is stored
        added = value + tl.load(residual + row + column, mask=inside, other=0.0).to(tl.float32)
        rounded = added.to(total.dtype.element_ty)
        tl.store(total + row + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / size + eps)
    normed = (value * scale).to(out.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_kernel(out, gate_up, size, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * size + column, result.to(out.dtype.element_ty), mask=inside)
