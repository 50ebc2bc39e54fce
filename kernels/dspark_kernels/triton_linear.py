"""Triton: x @ weight.T with the weight in 8 bits, each output scaled at the end: half the bytes to read."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_OUTPUTS, _INNER = 64, 128


def scaled_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    x = x.contiguous()
    rows, inner = x.shape
    outputs = weight.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    tile = max(16, min(64, triton.next_power_of_2(rows)))
    if rows:
        _scaled_kernel[(triton.cdiv(outputs, _OUTPUTS), triton.cdiv(rows, tile))](
            x,
            weight,
            scales,
            scales if bias is None else bias,
            out,
            rows,
            outputs,
            inner,
            HAS_BIAS=bias is not None,
            ROWS=tile,
            OUTPUTS=_OUTPUTS,
            INNER=_INNER,
            num_stages=3,
        )
    return out


@triton.jit
def _scaled_kernel(
    x, weight, scales, bias, out, rows, outputs, inner,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    in_rows, in_outputs = row < rows, output < outputs
    # What is outside reads the first row or output, and is not stored.
    a_rows = tl.where(in_rows, row, 0).to(tl.int64)[:, None] * inner
    w_rows = tl.where(in_outputs, output, 0).to(tl.int64)[None, :] * inner
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for begin in range(0, inner, INNER):
        place = begin + tl.arange(0, INNER)
        inside = place < inner
        a = tl.load(x + a_rows + place[None, :], mask=inside[None, :], other=0.0)
        # Clamped instead of masked: an 8-bit float has no fill value, and a is 0 there.
        w = tl.load(weight + w_rows + tl.minimum(place, inner - 1)[:, None])
        w = w.to(tl.float32).to(a.dtype)  # exact: 8 bits
        total += tl.dot(a, w, input_precision="ieee")
    result = total * tl.load(scales + output, mask=in_outputs, other=0.0)[None, :]
    if HAS_BIAS:
        result += tl.load(bias + output, mask=in_outputs, other=0.0).to(tl.float32)[None, :]
    at = row[:, None].to(tl.int64) * outputs + output[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=in_rows[:, None] & in_outputs[None, :])
