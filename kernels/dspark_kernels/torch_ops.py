"""The torch reference of every op (attention and sampling in files of their own): plain, differentiable, any
device. Arithmetic is fp32 inside.

Rounding follows Hugging Face's Llama where two orders are possible (the norm rounds before it scales), so
that bf16 results stay as close to transformers' as the faster versions allow.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_kernels.torch_attention import block_attention, paged_attention
from dspark_kernels.torch_sampling import (
    accept,
    filtered_probs,
    inverse_cdf,
    leading_matches,
    noisy_argmax,
    survival_lengths,
)

__all__ = [
    "accept",
    "add_rms_norm",
    "argmax",
    "block_attention",
    "filtered_probs",
    "inverse_cdf",
    "k_rope_store",
    "leading_matches",
    "markov_chain",
    "markov_logits",
    "noisy_argmax",
    "paged_attention",
    "qkv_rope",
    "qkv_rope_store",
    "rms_norm",
    "scaled_linear",
    "silu_mul",
    "survival_lengths",
]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight * (x32 * scale).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def argmax(x: Tensor) -> Tensor:
    return x.argmax(dim=-1)


def markov_chain(
    base: Tensor, w1: Tensor, w2: Tensor, anchors: Tensor, vocab_map: Tensor | None
) -> tuple[Tensor, Tensor]:
    previous, seen, ids = anchors, [], []
    for slot in range(base.shape[1]):
        seen.append(previous)
        chosen = markov_logits(base[:, slot], w1, w2, previous).argmax(dim=-1)
        previous = chosen if vocab_map is None else vocab_map[chosen]
        ids.append(previous)
    return torch.stack(ids, dim=1), torch.stack(seen, dim=1)


def markov_logits(base: Tensor, w1: Tensor, w2: Tensor, previous: Tensor) -> Tensor:
    return base.float() + w1[previous].float() @ w2.float()


def scaled_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    out = (x.float() @ weight.float().t()) * scales
    return (out if bias is None else out + bias.float()).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in the half-split convention: x [N, heads, D], cos and sin [N, D/2] fp32 → [N, heads, D]."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


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
    head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    return rotate(q, cos, sin), rotate(k, cos, sin), v.contiguous()


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
    q, k, v = qkv_rope(qkv, cos, sin, num_heads, num_kv_heads, q_norm, k_norm, eps)
    _store(k, v, k_cache, v_cache, slots, k_scale, v_scale)
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
    k, v = kv.view(kv.shape[0], 2, num_kv_heads, -1).unbind(1)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    _store(rotate(k, cos, sin), v, k_cache, v_cache, slots)


def _store(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write rows to their cache slots; rows with a negative slot are dropped."""
    kept = slots >= 0
    if k_cache.dtype == torch.float8_e4m3fn:
        k_cache, k = k_cache.view(torch.uint8), _float8_bits(k, k_scale)
        v_cache, v = v_cache.view(torch.uint8), _float8_bits(v, v_scale)
    k_cache[slots[kept]] = k[kept]
    v_cache[slots[kept]] = v[kept]


def _float8_bits(x: Tensor, scale: float) -> Tensor:
    largest = torch.finfo(torch.float8_e4m3fn).max
    steps = (x.float() * (1.0 / scale)).clamp(-largest, largest)
    return steps.to(torch.float8_e4m3fn).view(torch.uint8)
