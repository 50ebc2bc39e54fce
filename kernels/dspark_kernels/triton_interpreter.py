"""Repairs Triton's interpreter for bf16 and float8: it truncates bf16 where a GPU rounds to the nearest even
number, multiplies the bits of its matrices instead of their values, and forgets to carry where a float8 is
rounded up to the next power of two. Compiled kernels are not touched.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray


def is_interpreted() -> bool:
    """Whether the kernels of this process run in the interpreter."""
    return bool(triton.knobs.runtime.interpret)


def repair() -> None:
    """Idempotent; nothing unless the kernels are interpreted."""
    if not is_interpreted():
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    builder: Any = InterpreterBuilder
    if getattr(builder, "rounds", False):
        return
    cast, convert, dot = builder.cast_impl, builder.create_fp_to_fp, builder.create_dot

    def cast_impl(self: Any, source: Any, kind: Any) -> Any:
        if source.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
            return TensorHandle(_to_bfloat16(source.data), tl.bfloat16)
        return cast(self, source, kind)

    def create_fp_to_fp(self: Any, source: Any, kind: Any, rounding: Any) -> Any:
        if source.dtype.scalar == tl.float32 and kind.scalar == tl.float8e4nv:
            return TensorHandle(_to_float8(source.data), tl.float8e4nv)
        return convert(self, source, kind, rounding)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a = cast_impl(self, a, tl.float32)
        if b.dtype.scalar == tl.bfloat16:
            b = cast_impl(self, b, tl.float32)
        return dot(self, a, b, *rest)

    builder.cast_impl, builder.create_fp_to_fp, builder.create_dot = cast_impl, create_fp_to_fp, create_dot
    builder.rounds = True


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits, rounded to the nearest, ties to even; a NaN stays one."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _to_float8(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The bits of e4m3, rounded as torch rounds."""
    rounded = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(torch.float8_e4m3fn)
    bits: NDArray[np.uint8] = rounded.view(torch.uint8).numpy()
    return bits.reshape(values.shape)
