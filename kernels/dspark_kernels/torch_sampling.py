"""The torch reference of filters, acceptance and admission: any device, and on a CPU what runs."""

import torch
from torch import Tensor

_TOP_P_CANDIDATES = 1024


def filtered_probs(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    scaled = logits.float() / temperature
    if top_k is not None:
        scaled = _mask_top_k(scaled, top_k)
    probs = torch.softmax(scaled, dim=-1)
    if top_p is not None:
        probs = _mask_top_p(probs, top_p)
    if min_p is not None:
        floor = probs.amax(dim=-1, keepdim=True) * min_p
        probs = probs.masked_fill(probs < floor, 0.0)
    if top_p is not None or min_p is not None:
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs


def _mask_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    vocab_size = logits.shape[1]
    limited = top_k < vocab_size  # [N, 1]
    widest = int(torch.where(limited, top_k, 1).max())
    values = logits.topk(widest, dim=-1).values  # descending
    threshold = values.gather(1, (top_k - 1).clamp(max=widest - 1))
    return logits.masked_fill(limited & (logits < threshold), float("-inf"))


def _mask_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the nucleus. Sorting the head of the distribution is enough for almost every row."""
    width = min(_TOP_P_CANDIDATES, probs.shape[1])
    values = probs.topk(width, dim=-1).values
    short = (values.sum(-1, keepdim=True) < top_p) & (top_p < 1.0)
    if width < probs.shape[1] and bool(short.any()):
        values = probs.sort(dim=-1, descending=True).values
    before = values.cumsum(-1) - values  # mass of the strictly likelier tokens
    last = (before < top_p).sum(-1, keepdim=True).clamp(min=1) - 1
    threshold = values.gather(1, last)
    return probs.masked_fill((probs < threshold) & (top_p < 1.0), 0.0)


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    cdf = weights.double().cumsum(-1)
    target = (uniforms.double() * cdf[:, -1]).unsqueeze(1)
    index = torch.searchsorted(cdf, target, right=True).clamp(max=weights.shape[1] - 1)
    if bool((weights.gather(1, index) <= 0).any()):  # rounding went past the last token with mass
        positions = torch.arange(weights.shape[1], device=weights.device).expand_as(weights)
        index = torch.minimum(index, torch.where(weights > 0, positions, 0).amax(-1, keepdim=True))
    return index.squeeze(1)


def leading_matches(chosen: Tensor, drafted: Tensor, row_start: Tensor, most: int) -> tuple[Tensor, Tensor]:
    counts = _leading(chosen == drafted, row_start, most)
    return counts, chosen[row_start[:-1].long() + counts]


def accept(
    probs: Tensor,
    drafted: Tensor,
    row_start: Tensor,
    most: int,
    uniforms: Tensor,
    keys: Tensor,
    draft_probs: Tensor | None,
    one_hot: Tensor | None,
    vocab_map: Tensor | None,
    draft_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rows = torch.arange(len(probs), device=probs.device)
    p, q = probs[rows, drafted].double(), torch.ones(len(probs), dtype=torch.float64, device=probs.device)
    starts, lengths = row_start[:-1].long(), row_start.diff().long() - 1
    hot = torch.ones(len(starts), dtype=torch.bool, device=probs.device)
    if draft_probs is not None:
        hot = torch.zeros_like(hot) if one_hot is None else one_hot.bool()
        own = draft_probs[rows, drafted if draft_ids is None else draft_ids].double()
        owner = torch.searchsorted(row_start, rows, right=True) - 1
        q = torch.where(hot[owner.clamp(max=len(hot) - 1)], q, own)
    counts = _leading(uniforms * q < p, row_start, most)
    decides, is_rejected = starts + counts, counts < lengths
    target = probs[decides]
    residual = target.clone()
    if draft_probs is not None:
        spread = draft_probs[decides] * (is_rejected & ~hot)[:, None]
        if vocab_map is None:
            residual -= spread
        else:
            residual.index_add_(1, vocab_map, spread, alpha=-1)
    ones = (is_rejected & hot).float()[:, None]
    residual.scatter_add_(1, drafted[decides][:, None], -ones)
    residual.clamp_(min=0.0)
    # p = q up to rounding leaves nothing: the rejection itself was rounding, and p is what is owed.
    weights = torch.where(residual.sum(1, keepdim=True) > 0, residual, target)
    return counts, noisy_argmax(weights, keys, None)


def _leading(stands: Tensor, row_start: Tensor, most: int) -> Tensor:
    """How many of each request's first rows stand, its last one left out. stands [M] bool → [R] int64"""
    starts, lengths = row_start[:-1].long(), row_start.diff().long() - 1
    place = torch.arange(most, device=stands.device)
    inside = place[None, :] < lengths[:, None]
    rows = torch.where(inside, starts[:, None] + place, 0)
    return (stands[rows] & inside).long().cumprod(1).sum(1)


def survival_lengths(confidences: Tensor, budget: Tensor, max_lens: Tensor) -> Tensor:
    requests, block = confidences.shape
    bounded = confidences.double().nan_to_num(nan=0.0).clamp(0.0, 1.0)
    survival = bounded.cumprod(1)
    allowed = torch.arange(block, device=confidences.device)[None, :] < max_lens[:, None]
    # Position-major order, so that a stable sort admits the earlier of equals.
    values = torch.where(allowed, survival, -1.0).t().reshape(-1)
    order = values.argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    admitted = (rank < budget).view(block, requests) & allowed.t()
    return admitted.sum(0).int()


_GOLDEN, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # as in csrc/noise.h


def noisy_argmax(probs: Tensor, keys: Tensor, ids: Tensor | None) -> Tensor:
    if ids is None:
        ids = torch.arange(probs.shape[1], device=probs.device)
    return (-uniform(keys[:, None], ids).log() / probs.double()).argmin(dim=-1)


def uniform(keys: Tensor, ids: Tensor) -> Tensor:
    """In (0, 1), from a hash of key and id. int64, broadcast → float64"""
    hashed = _mix(keys + (ids + 1) * _GOLDEN)  # int64 wraps, as the unsigned numbers do
    return (_shift(hashed, 12).double() + 0.5) * 2.0**-52


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Right, filled with zeros: torch's own shift copies the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
