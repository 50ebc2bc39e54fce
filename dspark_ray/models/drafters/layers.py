"""The layers that drafter networks are made of, for training; inference has fused forms of the same."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark_ray.core.errors import ConfigError
from dspark_ray.models.drafters.shape import DrafterShape

Rope = tuple[Tensor, Tensor]  # cos, sin [N, 1, T, head_dim / 2]
KeysValues = tuple[Tensor, Tensor]  # [N, num_key_value_heads, S, head_dim] each


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Grouped-query attention of rows to given keys and their own, under a mask; no causality by itself."""

    def __init__(self, shape: DrafterShape, input_size: int | None = None) -> None:
        """`input_size`: width of what q, k and v read, where it is not the hidden size (EAGLE-3: twice)."""
        super().__init__()
        self.num_kv_heads, self.head_dim = shape.num_key_value_heads, shape.head_dim
        self.group_size = shape.num_attention_heads // shape.num_key_value_heads
        query_size = shape.num_attention_heads * shape.head_dim
        kv_size = shape.num_key_value_heads * shape.head_dim
        width = input_size or shape.hidden_size
        self.q_proj = nn.Linear(width, query_size, bias=False)
        self.k_proj = nn.Linear(width, kv_size, bias=False)
        self.v_proj = nn.Linear(width, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if shape.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if shape.qk_norm else nn.Identity()

    def project_kv(self, x: Tensor, rope: Rope) -> KeysValues:
        """Keys (normed, rotated) and values of x [N, S, width]."""
        rows = (*x.shape[:2], self.num_kv_heads, self.head_dim)
        keys = self.k_norm(self.k_proj(x).view(rows)).transpose(1, 2)
        return apply_rope(keys, rope), self.v_proj(x).view(rows).transpose(1, 2)

    def attend(self, x: Tensor, rope: Rope, keys_values: KeysValues, mask: Tensor) -> Tensor:
        """x [N, T, width] against all keys [N, num_kv_heads, S, head_dim]; mask [N, 1, group·T, S] added to
        the scores → [N, T, H]."""
        n, t, _ = x.shape
        queries = self.q_norm(self.q_proj(x).view(n, t, -1, self.head_dim)).transpose(1, 2)
        # Query heads that share a KV head become extra rows of it: one plain attention, keys never copied.
        queries = apply_rope(queries, rope).reshape(n, self.num_kv_heads, self.group_size * t, self.head_dim)
        keys, values = keys_values
        # Spelt out: with a mask and a backward pass, two batched products beat the fused CPU kernel.
        scores = (queries * self.head_dim**-0.5) @ keys.transpose(-1, -2) + mask.to(queries.dtype)
        out = scores.softmax(-1).to(values.dtype) @ values
        return self.o_proj(out.reshape(n, -1, t, self.head_dim).transpose(1, 2).reshape(n, t, -1))

    def forward(self, x: Tensor, rope: Rope, context: KeysValues, mask: Tensor) -> Tensor:
        """Rows x [N, T, H] against the context's S keys and their own; mask [N, 1, group·T, S + T]."""
        return self.attend(x, rope, join(context, self.project_kv(x, rope)), mask)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """A pre-norm decoder layer whose attention also sees the context."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, rope: Rope, context: KeysValues, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, context, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


def join(first: KeysValues, second: KeysValues) -> KeysValues:
    """The keys of both, one after the other."""
    return torch.cat((first[0], second[0]), dim=2), torch.cat((first[1], second[1]), dim=2)


def additive_mask(visible: Tensor, shape: DrafterShape) -> Tensor:
    """visible [N, T, S] bool → [N, 1, group · T, S]: 0 where a row may look, −∞ elsewhere."""
    mask = torch.zeros(visible.shape, dtype=torch.float32).masked_fill_(~visible, -math.inf)
    return mask.unsqueeze(1).repeat(1, 1, shape.num_attention_heads // shape.num_key_value_heads, 1)


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> Rope:
    """cos and sin of the rotary angles, [N, 1, T, head_dim / 2] each, fp32 (RoFormer, eq. 15)."""
    frequencies = theta ** (
        -torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    )
    angles = positions[:, None, :, None].float() * frequencies
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotate the two halves of the last dimension (the Llama layout). x [N, heads, T, head_dim]."""
    cos, sin = (table.to(x.dtype) for table in rope)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def require_plain_rope(shape: DrafterShape) -> None:
    """`ConfigError` for scaled rotary angles, which `rope_tables` does not compute."""
    if shape.rope_type != "default":
        raise ConfigError(f"a drafter with rope_type {shape.rope_type!r} cannot be run by this network")
