"""Triton: the largest of each row, a draw with shared noise, and a drafter's sequential chain.

A row is cut into chunks; each program leaves the cost and the index of its best, a second kernel takes the
first of the cheapest. Costs are what is minimised: −x for an argmax, E / p for a draw.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024
_CHUNK = 8 * _TILE  # columns of a program
_MARKOV_COLUMNS = 128
_MARKOV_RANK = 64  # of the product's inner dimension at a time


def argmax(x: Tensor) -> Tensor:
    x = x.contiguous()
    rows, size = x.shape
    chunks = triton.cdiv(size, _CHUNK)
    costs = torch.empty((rows, chunks), dtype=torch.float32, device=x.device)
    places = torch.empty((rows, chunks), dtype=torch.int64, device=x.device)
    if rows:
        _argmax_kernel[(rows, chunks)](x, costs, places, size, CHUNK=_CHUNK, TILE=_TILE)
    return _first_cheapest(costs, places, None)


def noisy_argmax(probs: Tensor, keys: Tensor, ids: Tensor | None) -> Tensor:
    probs, keys = probs.contiguous(), keys.contiguous()
    rows, size = probs.shape
    chunks = triton.cdiv(size, _CHUNK)
    costs = torch.empty((rows, chunks), dtype=torch.float64, device=probs.device)
    places = torch.empty((rows, chunks), dtype=torch.int64, device=probs.device)
    if rows:
        _race_kernel[(rows, chunks)](
            probs,
            keys,
            keys if ids is None else ids.contiguous(),
            costs,
            places,
            size,
            HAS_IDS=ids is not None,
            CHUNK=_CHUNK,
            TILE=_TILE,
        )
    return _first_cheapest(costs, places, None)


def markov_chain(
    base: Tensor, w1: Tensor, w2: Tensor, anchors: Tensor, vocab_map: Tensor | None
) -> tuple[Tensor, Tensor]:
    requests, slots, _ = base.shape
    ids = torch.empty((slots, requests), dtype=torch.int64, device=base.device)
    previous = anchors
    for slot in range(slots):
        costs, places = _markov_costs(base[:, slot], w1, w2, previous, None)
        previous = _first_cheapest(costs, places, vocab_map, out=ids[slot])
    return ids.t().contiguous(), torch.cat([anchors[None], ids[:-1]]).t().contiguous()


def markov_logits(base: Tensor, w1: Tensor, w2: Tensor, previous: Tensor) -> Tensor:
    logits = torch.empty(base.shape, dtype=torch.float32, device=base.device)
    _markov_costs(base, w1, w2, previous, logits)
    return logits


def _markov_costs(
    base: Tensor, w1: Tensor, w2: Tensor, previous: Tensor, logits: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One slot: bias and the best of each chunk; the logits too where they are wanted. base [R, Vd]"""
    assert base.stride(1) == 1
    assert w1.is_contiguous()
    assert w2.is_contiguous()
    if not base.dtype == w1.dtype == w2.dtype:
        w1, w2 = w1.float(), w2.float()
    requests, vocab = base.shape
    chunks = triton.cdiv(vocab, _MARKOV_COLUMNS)
    costs = torch.empty((requests, chunks), dtype=torch.float32, device=base.device)
    places = torch.empty((requests, chunks), dtype=torch.int64, device=base.device)
    tile = max(16, min(64, triton.next_power_of_2(requests)))
    if requests:
        _markov_kernel[(chunks, triton.cdiv(requests, tile))](
            base,
            w1,
            w2,
            previous,
            costs if logits is None else logits,
            costs,
            places,
            base.stride(0),
            requests,
            vocab,
            w2.shape[0],
            chunks,
            STORE=logits is not None,
            TILE=tile,
            COLUMNS=_MARKOV_COLUMNS,
            RANK=_MARKOV_RANK,
        )
    return costs, places


def _first_cheapest(
    costs: Tensor, places: Tensor, vocab_map: Tensor | None, *, out: Tensor | None = None
) -> Tensor:
    """The place of the lowest cost of each row, the lowest place of equals; its target id with a map."""
    rows, chunks = costs.shape
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=costs.device)
    if rows:
        _first_cheapest_kernel[(rows,)](
            costs,
            places,
            places if vocab_map is None else vocab_map,
            out,
            chunks,
            HAS_MAP=vocab_map is not None,
            TILE=triton.next_power_of_2(chunks),
        )
    return out


@triton.jit
def _first_cheapest_kernel(costs, places, vocab_map, out, chunks, HAS_MAP: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, TILE)
    inside = chunk < chunks
    cost = tl.load(costs + row * chunks + chunk, mask=inside, other=float("inf"))
    place = tl.load(places + row * chunks + chunk, mask=inside, other=0x7FFFFFFFFFFFFFFF)
    lowest = tl.min(cost, axis=0)
    found = tl.min(tl.where(cost == lowest, place, 0x7FFFFFFFFFFFFFFF), axis=0)
    if HAS_MAP:
        found = tl.load(vocab_map + found)
    tl.store(out + row, found)


@triton.jit
def _argmax_kernel(x, costs, places, size, CHUNK: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    first = chunk * CHUNK
    lane = tl.arange(0, TILE)
    best = tl.full([TILE], float("inf"), tl.float32)
    place = first + lane
    for begin in range(first, tl.minimum(first + CHUNK, size), TILE):
        column = begin + lane
        value = tl.load(x + row * size + column, mask=column < size, other=float("-inf")).to(tl.float32)
        better = -value < best
        best = tl.where(better, -value, best)
        place = tl.where(better, column, place)
    lowest = tl.min(best, axis=0)
    found = tl.min(tl.where(best == lowest, place, 0x7FFFFFFF), axis=0)
    at = row * tl.num_programs(1) + chunk
    tl.store(costs + at, lowest)
    tl.store(places + at, found.to(tl.int64))


@triton.jit
def uniform(key, token):
    """In (0, 1), from a hash of key and token id, all bits as in csrc/noise.h. int64 wraps as the unsigned
    numbers do; shifts are filled with zeros by hand."""
    z = key + (token + 1) * -0x61C8864680B583EB
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    z = z ^ ((z >> 31) & 0x1FFFFFFFF)
    return (((z >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def race(key, token, weight, place, best, found):
    """One tile of the race E / weight with E = −log u: the cheapest so far (a float64) and its place.

    E ≥ 1 − u: a tile in which nobody can win by that bound is passed over without a logarithm.
    """
    u = uniform(key, token)
    runs = (weight > 0.0) & (1.0 - u <= best * weight)
    if tl.sum(runs.to(tl.int32), axis=0) > 0:
        cost = tl.where(runs, -tl.log(u) / tl.where(runs, weight, 1.0), float("inf"))
        lowest = tl.min(cost, axis=0)
        if lowest < best:
            best = lowest
            found = tl.min(tl.where(cost == lowest, place, 0x7FFFFFFF), axis=0)
    return best, found


@triton.jit
def _race_kernel(
    probs, keys, ids, costs, places, size, HAS_IDS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    first = chunk * CHUNK
    key = tl.load(keys + row)
    best = tl.full([], float("inf"), tl.float64)
    found = first
    for begin in range(first, tl.minimum(first + CHUNK, size), TILE):
        column = begin + tl.arange(0, TILE)
        inside = column < size
        weight = tl.load(probs + row * size + column, mask=inside, other=0.0).to(tl.float64)
        token = column.to(tl.int64)
        if HAS_IDS:
            token = tl.load(ids + column, mask=inside, other=0)
        best, found = race(key, token, weight, column, best, found)
    at = row * tl.num_programs(1) + chunk
    tl.store(costs + at, best)
    tl.store(places + at, found.to(tl.int64))


@triton.jit
def _markov_kernel(
    base, w1, w2, previous, logits, costs, places, base_stride, requests, vocab, rank, chunks,
    STORE: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """base + W1[previous] W2 of some requests and columns in fp32, and the best of these columns."""
    chunk = tl.program_id(0)
    request = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = chunk * COLUMNS + tl.arange(0, COLUMNS)
    inside = request < requests
    in_vocab = column < vocab
    token = tl.load(previous + request, mask=inside, other=0)
    total = tl.zeros([TILE, COLUMNS], tl.float32)
    for begin in range(0, rank, RANK):
        inner = begin + tl.arange(0, RANK)
        in_rank = inner < rank
        embedding = tl.load(
            w1 + token[:, None] * rank + inner[None, :],
            mask=inside[:, None] & in_rank[None, :],
            other=0.0,
        )
        part = tl.load(
            w2 + inner[:, None].to(tl.int64) * vocab + column[None, :],
            mask=in_rank[:, None] & in_vocab[None, :],
            other=0.0,
        )
        total += tl.dot(embedding, part, input_precision="ieee")
    at = request[:, None].to(tl.int64)
    mask = inside[:, None] & in_vocab[None, :]
    total += tl.load(base + at * base_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if STORE:
        tl.store(logits + at * vocab + column[None, :], total, mask=mask)
    cost = tl.where(in_vocab[None, :], -total, float("inf"))
    lowest = tl.min(cost, axis=1)
    found = tl.min(tl.where(cost == lowest[:, None], column[None, :], 0x7FFFFFFF), axis=1)
    tl.store(costs + request.to(tl.int64) * chunks + chunk, lowest, mask=inside)
    tl.store(places + request.to(tl.int64) * chunks + chunk, found.to(tl.int64), mask=inside)
