"""The DSpark drafter network: parallel backbone, Markov head, confidence head (DSpark paper, section 3).

One module serves training and inference. Its tensor names are DeepSpec's, so a `state_dict` is a checkpoint.
The embedding and the LM head belong to the target: they are arguments here, never parameters.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark_ray.core.errors import ConfigError

ContextKV = list[tuple[Tensor, Tensor]]  # per layer: keys, values [N, num_key_value_heads, S, head_dim]


@dataclass(frozen=True)
class DSparkConfig:
    """Everything a checkpoint's config.json says about the drafter, under the paper's names."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]  # 0-based; the layer's OUTPUT is the tap
    mask_token_id: int
    block_size: int = 7  # γ: tokens drafted a block
    draft_vocab_size: int | None = None  # None: the drafter speaks the whole vocabulary
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    qk_norm: bool = True
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] = field(
        default_factory=dict
    )  # kept as read; only "default" is computed here

    @property
    def output_size(self) -> int:
        """Rows of the drafter's logits: the draft vocabulary, or the target's when there is none."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def confidence_size(self) -> int:
        """Inputs of the confidence head: the hidden state, with W1[prev] behind it where configured."""
        return self.hidden_size + (self.markov_rank if self.confidence_head_with_markov else 0)


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Attention of block rows to context keys and to the rows of their own block; no causality."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.num_kv_heads, self.head_dim = config.num_key_value_heads, config.head_dim
        self.group_size = config.num_attention_heads // config.num_key_value_heads
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def project_kv(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys (normed, rotated) and values of x [N, S, H] → two [N, num_kv_heads, S, head_dim]."""
        shape = (*x.shape[:2], self.num_kv_heads, self.head_dim)
        keys = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        return apply_rope(keys, rope), self.v_proj(x).view(shape).transpose(1, 2)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        """x [N, T, H]; context keys, values [N, num_kv_heads, S, head_dim]; mask [N, 1, group·T, S + T]."""
        n, t, _ = x.shape
        queries = self.q_norm(self.q_proj(x).view(n, t, -1, self.head_dim)).transpose(1, 2)
        # Query heads that share a KV head become extra rows of it: one plain attention, keys never copied.
        queries = apply_rope(queries, rope).reshape(n, self.num_kv_heads, self.group_size * t, self.head_dim)
        keys, values = self.project_kv(x, rope)
        keys = torch.cat((context[0], keys), dim=2)
        values = torch.cat((context[1], values), dim=2)
        # Spelt out: with a mask and a backward pass, two batched products beat the fused CPU kernel.
        scores = (queries * self.head_dim**-0.5) @ keys.transpose(-1, -2) + mask.to(queries.dtype)
        out = scores.softmax(-1).to(values.dtype) @ values
        return self.o_proj(out.reshape(n, -1, t, self.head_dim).transpose(1, 2).reshape(n, t, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """A pre-norm decoder layer whose attention also sees the context."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, context, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """B(prev, ·) = W2 W1[prev]: a low-rank bigram bias. W1 is over target ids, W2 over draft ids."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.output_size, bias=False)


class ConfidenceHead(nn.Module):
    """w·[h_k; W1[prev_k]] + b: the logit of surviving position k, given that all before it survived."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.confidence_size, 1)


class DSparkNetwork(nn.Module):
    """The drafter. Slot k of a block [anchor, mask × (γ−1)] predicts the token at anchor + k + 1."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        rope_type = config.rope_scaling.get("rope_type", config.rope_scaling.get("type", "default"))
        if rope_type != "default":
            raise ConfigError(f"a DSpark drafter with rope_type {rope_type!r} cannot be run by this network")
        self.config = config
        h = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * h, h, bias=False)
        self.hidden_norm = RMSNorm(h, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(h, config.rms_norm_eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None

    def context(self, taps: Tensor) -> Tensor:
        """Fused taps: hidden_norm(fc(taps)). taps [..., n_taps · H] → [..., H]."""
        return self.hidden_norm(self.fc(taps))

    def context_kv(self, context: Tensor, positions: Tensor) -> ContextKV:
        """Every layer's context keys and values. context [N, S, H], positions [N, S] absolute."""
        rope = rope_tables(positions, self.config.head_dim, self.config.rope_theta)
        layers = cast(Iterable[DraftLayer], self.layers)
        return [layer.self_attn.project_kv(context, rope) for layer in layers]

    def forward(self, embeddings: Tensor, positions: Tensor, context: ContextKV, visible: Tensor) -> Tensor:
        """Hidden states of the slots, normed for the LM head.

        Args: embeddings [N, T, H] of block ids (a row may hold several blocks); positions [N, T] absolute;
        context, one pair a layer; visible [N, T, S + T] bool, True where a slot may look: the context before
        its anchor and its own block. Returns [N, T, H].
        """
        rope = rope_tables(positions, self.config.head_dim, self.config.rope_theta)
        mask = torch.zeros(visible.shape, dtype=torch.float32).masked_fill_(~visible, -math.inf)
        group_size = self.config.num_attention_heads // self.config.num_key_value_heads
        mask = mask.unsqueeze(1).repeat(1, 1, group_size, 1)
        hidden = embeddings
        for layer, layer_context in zip(self.layers, context, strict=True):
            hidden = layer(hidden, rope, layer_context, mask)
        return self.norm(hidden)

    def markov_embedding(self, previous: Tensor) -> Tensor | None:
        """W1[previous target ids] [..., r]; None without a Markov head."""
        return self.markov_head.markov_w1(previous) if self.markov_head else None

    def logits(self, hidden: Tensor, head_weight: Tensor, markov: Tensor | None) -> Tensor:
        """Draft logits: head rows of the draft vocabulary [Vd, H] applied to hidden, plus the Markov bias."""
        logits = F.linear(hidden, head_weight)
        return logits if self.markov_head is None else logits + self.markov_head.markov_w2(markov)

    def confidence_logit(self, hidden: Tensor, markov: Tensor | None) -> Tensor:
        """Logit of the conditional acceptance of each slot. hidden [..., H] → [...]."""
        assert self.confidence_head is not None, "this drafter has no confidence head"
        if self.config.confidence_head_with_markov:
            assert markov is not None, "confidence_head_with_markov needs a Markov head"
            hidden = torch.cat((hidden, markov.to(hidden.dtype)), dim=-1)
        return self.confidence_head.proj(hidden).squeeze(-1)


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, [N, 1, T, head_dim / 2] each, fp32 (RoFormer, eq. 15)."""
    frequencies = theta ** (
        -torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    )
    angles = positions[:, None, :, None].float() * frequencies
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the two halves of the last dimension (the Llama layout). x [N, heads, T, head_dim]."""
    cos, sin = (table.to(x.dtype) for table in rope)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
