"""Triton: from confidences to lengths, on the device: survival, then the highest of all requests together."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def survival_lengths(confidences: Tensor, budget: Tensor, max_lens: Tensor) -> Tensor:
    confidences = confidences.contiguous()
    requests, block = confidences.shape
    lens = torch.empty(requests, dtype=torch.int32, device=confidences.device)
    if not requests or not block:
        return lens.zero_()
    # By position, then request: the order in which equals are admitted.
    survival = torch.empty((block, requests), dtype=torch.float64, device=confidences.device)
    _survival_kernel[(triton.cdiv(requests, 128),)](
        confidences, max_lens, survival, requests, block, TILE=128, num_warps=4
    )
    tile = triton.next_power_of_2(requests)
    slots = triton.next_power_of_2(block)
    _admit_kernel[(1,)](
        survival,
        budget,
        lens,
        requests,
        block,
        REQUESTS=tile,
        SLOTS=slots,
        num_warps=min(16, max(1, tile * slots // 256)),
    )
    return lens


@triton.jit
def _survival_kernel(confidences, max_lens, survival, requests, block, TILE: tl.constexpr):
    """Products from left to right in float64, as the host's are; −1 where a token may not be verified."""
    request = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = request < requests
    longest = tl.load(max_lens + request, mask=inside, other=0)
    alive = tl.full([TILE], 1.0, tl.float64)
    for slot in range(0, block):
        chance = tl.load(confidences + request * block + slot, mask=inside, other=0.0).to(tl.float64)
        chance = tl.where(chance > 0.0, tl.where(chance < 1.0, chance, 1.0), 0.0)  # a NaN is 0
        alive = alive * chance
        tl.store(survival + slot * requests + request, tl.where(slot < longest, alive, -1.0), mask=inside)


@triton.jit
def _admit_kernel(survival, budget, lens, requests, block, REQUESTS: tl.constexpr, SLOTS: tl.constexpr):
    """The threshold by bisection on the bits, whose order is that of the numbers; then the earliest of those
    that equal it."""
    request = tl.arange(0, REQUESTS)
    slot = tl.arange(0, SLOTS)
    inside = (slot < block)[:, None] & (request < requests)[None, :]
    at = slot[:, None] * requests + request[None, :]
    value = tl.load(survival + at, mask=inside, other=-1.0)
    bits = value.to(tl.int64, bitcast=True)  # negative where a token may not be verified
    wanted = tl.load(budget).to(tl.int64)
    low = tl.full([], 0, tl.int64)
    high = tl.full([], 0x3FF0000000000000, tl.int64)  # 1.0
    while low < high:  # the highest threshold that admits enough
        middle = low + (high - low + 1) // 2
        if tl.sum(tl.sum((bits >= middle).to(tl.int64), axis=1), axis=0) >= wanted:
            low = middle
        else:
            high = middle - 1
    left = wanted - tl.sum(tl.sum((bits > low).to(tl.int64), axis=1), axis=0)
    length = tl.zeros([REQUESTS], tl.int64)
    for position in range(0, block):
        own = tl.load(survival + position * requests + request, mask=request < requests, other=-1.0)
        own_bits = own.to(tl.int64, bitcast=True)
        equal = (own_bits == low).to(tl.int64)
        before = tl.cumsum(equal, axis=0) - equal
        admitted = (own_bits > low) | ((equal != 0) & (before < left))
        length += admitted.to(tl.int64)
        left -= tl.sum(equal, axis=0)
    tl.store(lens + request, length.to(tl.int32), mask=request < requests)
