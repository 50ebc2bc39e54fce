"""Triton: from a fused QKV projection to rotated queries, keys and values in the paged cache.

Two programs a row: one for the queries, one for keys and values. All heads of a row are one tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def qkv_rope(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = qkv.shape[0]
    dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    q = qkv.new_empty((rows, num_heads, dim))
    k, v = qkv.new_empty((2, rows, num_kv_heads, dim)).unbind(0)
    _rotate(qkv, cos, sin, q, num_heads, num_kv_heads, q_norm, k_norm, eps, k, v, None)
    return q, k, v


def qkv_rope_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    q = qkv.new_empty((qkv.shape[0], num_heads, k_cache.shape[2]))
    scales = (k_scale, v_scale)
    _rotate(qkv, cos, sin, q, num_heads, num_kv_heads, q_norm, k_norm, eps, k_cache, v_cache, slots, scales)
    return q


def k_rope_store(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_kv_heads: int,
    k_norm: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> None:
    _rotate(kv, cos, sin, None, 0, num_kv_heads, None, k_norm, eps, k_cache, v_cache, slots)


def _rotate(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k: Tensor,
    v: Tensor,
    slots: Tensor | None,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """`slots` None: k and v hold one row per input row. `q` None: the input has no queries. `scales`: of keys
    and values in float8."""
    assert cos.dtype == sin.dtype == torch.float32
    assert slots is None or slots.dtype == torch.int64
    dim = k.shape[2]
    assert k.stride()[1:] == v.stride()[1:] == (dim, 1), "a cache row's heads must lie side by side"
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    rows = qkv.shape[0]
    if not rows:
        return
    half = dim // 2
    widest = max(num_heads, num_kv_heads)
    _rope_kernel[(rows, 1 if q is None else 2)](
        qkv,
        cos,
        sin,
        k if q_norm is None else q_norm,  # any pointer stands for what is not there
        k if k_norm is None else k_norm,
        k if q is None else q,
        k,
        v,
        cos if slots is None else slots,
        qkv.shape[1],
        k.stride(0),
        v.stride(0),
        eps,
        1.0 / scales[0],
        1.0 / scales[1],
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HALF=half,
        Q_TILE=triton.next_power_of_2(max(1, num_heads)),
        KV_TILE=triton.next_power_of_2(num_kv_heads),
        HALF_TILE=triton.next_power_of_2(half),
        Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None,
        HAS_SLOTS=slots is not None,
        FLOAT8=k.dtype == torch.float8_e4m3fn,
        num_warps=8 if widest * dim >= 4096 else 4,
    )


@triton.jit
def _rope_kernel(
    qkv, cos, sin, q_norm, k_norm, q, k, v, slots, width, k_stride, v_stride, eps, k_steps, v_steps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, HALF_TILE: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, HAS_SLOTS: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source = qkv + row * width
    if tl.program_id(1) == 0:
        slot = row
        if HAS_SLOTS:
            slot = tl.load(slots + row)
        if slot >= 0:
            keys = source + HEADS * 2 * HALF
            _rotate_heads(
                keys, cos + row * HALF, sin + row * HALF, k_norm, k + slot * k_stride, eps, k_steps,
                KV_HEADS, HALF, KV_TILE, HALF_TILE, K_NORM, FLOAT8,
            )  # fmt: skip
            head = tl.arange(0, KV_TILE)[:, None]
            column = tl.arange(0, HALF_TILE)[None, :]
            inside = (head < KV_HEADS) & (column < HALF)
            place = head * (2 * HALF) + column
            values = keys + KV_HEADS * 2 * HALF
            target = v + slot * v_stride
            first = tl.load(values + place, mask=inside)
            second = tl.load(values + place + HALF, mask=inside)
            if FLOAT8:
                first = _in_steps(first.to(tl.float32), v_steps)
                second = _in_steps(second.to(tl.float32), v_steps)
            tl.store(target + place, first.to(target.dtype.element_ty), mask=inside)
            tl.store(target + place + HALF, second.to(target.dtype.element_ty), mask=inside)
    else:
        _rotate_heads(
            source, cos + row * HALF, sin + row * HALF, q_norm, q + row * HEADS * 2 * HALF, eps, 1.0,
            HEADS, HALF, Q_TILE, HALF_TILE, Q_NORM, False,
        )  # fmt: skip


@triton.jit
def _rotate_heads(
    source, cos, sin, norm, target, eps, steps,
    HEADS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, HALF_TILE: tl.constexpr, NORM: tl.constexpr,
    FLOAT8: tl.constexpr,
):  # fmt: skip
    """All heads of a row, side by side at `source`, normed and rotated to `target`."""
    head = tl.arange(0, TILE)[:, None]
    column = tl.arange(0, HALF_TILE)[None, :]
    inside = (head < HEADS) & (column < HALF)
    place = head * (2 * HALF) + column
    kind: tl.constexpr = source.dtype.element_ty
    stored: tl.constexpr = target.dtype.element_ty
    first = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + place + HALF, mask=inside, other=0.0).to(tl.float32)
    used = column < HALF
    if NORM:  # rounded where the reference rounds
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = (1.0 / tl.sqrt(squares / (2 * HALF) + eps))[:, None]
        w_first = tl.load(norm + column, mask=used, other=0.0).to(tl.float32)
        w_second = tl.load(norm + column + HALF, mask=used, other=0.0).to(tl.float32)
        first = ((first * scale).to(kind).to(tl.float32) * w_first).to(kind).to(tl.float32)
        second = ((second * scale).to(kind).to(tl.float32) * w_second).to(kind).to(tl.float32)
    c = tl.load(cos + column, mask=used, other=0.0)
    s = tl.load(sin + column, mask=used, other=0.0)
    low, high = (first * c - second * s).to(kind), (second * c + first * s).to(kind)
    if FLOAT8:
        low, high = _in_steps(low.to(tl.float32), steps), _in_steps(high.to(tl.float32), steps)
    tl.store(target + place, low.to(stored), mask=inside)
    tl.store(target + place + HALF, high.to(stored), mask=inside)


@triton.jit
def _in_steps(x, steps):
    """What float8 (e4m3) stores of x, before it is rounded."""
    return tl.minimum(tl.maximum(x * steps, -448.0), 448.0)
