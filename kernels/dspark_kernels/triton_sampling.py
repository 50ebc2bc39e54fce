"""Triton: from logits to the distribution that is sampled. One program a row, nothing read by the host.

Thresholds of top-k and top-p are found by bisection on the bits of the logits, whose order as integers is
their order as numbers: no sort, and exact.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def filtered_probs(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    logits = logits.contiguous()
    rows, size = logits.shape
    probs = torch.empty((rows, size), dtype=torch.float32, device=logits.device)
    if rows:
        _filter_kernel[(rows,)](
            logits,
            temperature,
            temperature if top_k is None else top_k,
            temperature if top_p is None else top_p,
            temperature if min_p is None else min_p,
            probs,
            size,
            TOP_K=top_k is not None,
            TOP_P=top_p is not None,
            MIN_P=min_p is not None,
            TILE=min(4096, triton.next_power_of_2(size)),
            num_warps=8,
        )
    return probs


@triton.jit
def _scaled(logits, begin, size, temperature, TILE: tl.constexpr):
    """A tile of logits over temperature, and the integers that are ordered as they are."""
    column = begin + tl.arange(0, TILE)
    value = tl.load(logits + column, mask=column < size, other=float("-inf")).to(tl.float32) / temperature
    value = tl.where(value == 0.0, 0.0, value)  # one zero
    bits = value.to(tl.int32, bitcast=True)
    return value, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _filter_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, probs, size,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * size
    temperature = tl.load(temperatures + row)
    largest = tl.full([], float("-inf"), tl.float32)
    for begin in range(0, size, TILE):
        value, _ = _scaled(logits, begin, size, temperature, TILE)
        largest = tl.maximum(largest, tl.max(value, axis=0))

    # The lowest integer that is kept; nothing is below that of −inf.
    threshold = tl.full([], -0x80000000, tl.int64)
    if TOP_K:
        wanted = tl.load(top_ks + row)
        if wanted < size:
            low = tl.full([], -0x80000000, tl.int64)
            high = tl.full([], 0x7FFFFFFF, tl.int64)
            while low < high:  # the highest threshold that keeps enough
                middle = low + (high - low + 1) // 2
                kept = tl.full([], 0, tl.int64)
                for begin in range(0, size, TILE):
                    value, order = _scaled(logits, begin, size, temperature, TILE)
                    inside = begin + tl.arange(0, TILE) < size
                    kept += tl.sum((inside & (order >= middle)).to(tl.int32), axis=0)
                if kept >= wanted:
                    low = middle
                    if kept == wanted:  # just these, whatever the threshold between
                        high = middle
                else:
                    high = middle - 1
            threshold = low

    mass = tl.full([], 0.0, tl.float32)
    for begin in range(0, size, TILE):
        value, order = _scaled(logits, begin, size, temperature, TILE)
        mass += tl.sum(tl.where(order >= threshold, tl.exp(value - largest), 0.0), axis=0)

    if TOP_P:
        share = tl.load(top_ps + row)
        if share < 1.0:
            low = threshold
            high = tl.full([], 0x7FFFFFFF, tl.int64)
            nucleus = mass
            while low < high:  # the highest threshold that keeps enough mass
                middle = low + (high - low + 1) // 2
                kept_mass = tl.full([], 0.0, tl.float32)
                for begin in range(0, size, TILE):
                    value, order = _scaled(logits, begin, size, temperature, TILE)
                    kept_mass += tl.sum(tl.where(order >= middle, tl.exp(value - largest), 0.0), axis=0)
                if (kept_mass >= share * mass) & (kept_mass > 0.0):
                    low = middle
                    nucleus = kept_mass
                else:
                    high = middle - 1
            threshold = low
            mass = nucleus

    if MIN_P:
        floor = tl.load(min_ps + row)
        mass = tl.full([], 0.0, tl.float32)
        for begin in range(0, size, TILE):
            value, order = _scaled(logits, begin, size, temperature, TILE)
            weight = tl.exp(value - largest)
            mass += tl.sum(tl.where((order >= threshold) & (weight >= floor), weight, 0.0), axis=0)
    for begin in range(0, size, TILE):
        value, order = _scaled(logits, begin, size, temperature, TILE)
        weight = tl.exp(value - largest)
        keep = order >= threshold
        if MIN_P:
            keep = keep & (weight >= floor)
        column = begin + tl.arange(0, TILE)
        tl.store(probs + row * size + column, tl.where(keep, weight / mass, 0.0), mask=column < size)
