"""EAGLE-3 and MTP drafter networks: one layer that feeds on its own output, a token at a time.

The layer's row t holds (the target's hidden state of token t, the embedding of token t + 1) and predicts
token t + 2. A block at anchor a starts with row a − 1, the last one that the target knows; row a − 1 + k
holds the layer's own output of the row before it and the k-th draft token. Rows before a − 1 are the context.

- `eagle3` (arXiv 2503.01840): hidden states of several taps, fused; q, k and v read [embedding; hidden]; its
  own LM head, over a reduced vocabulary.
- `mtp` (DeepSeek-V3, section 2.2): the last layer's output; both are projected to one vector, which a plain
  decoder layer reads; the target's LM head; made for one token (k = 1).
"""

from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark_ray.core.errors import ConfigError
from dspark_ray.models.drafters.layers import (
    MLP,
    Attention,
    DraftLayer,
    KeysValues,
    RMSNorm,
    additive_mask,
    join,
    require_plain_rope,
    rope_tables,
)
from dspark_ray.models.drafters.shape import DrafterShape


@dataclass(frozen=True, kw_only=True)
class AutoregressiveConfig(DrafterShape):
    """Either kind's config.json."""

    kind: Literal["eagle3", "mtp"]
    norm_before_residual: bool = False  # eagle3: the residual is the normed hidden state

    @property
    def has_own_head(self) -> bool:
        """EAGLE-3 trains an LM head; MTP uses the target's."""
        return self.kind == "eagle3"


class Eagle3Layer(nn.Module):
    """Attention over [embedding; hidden], both normed; the residual is the hidden state."""

    def __init__(self, config: AutoregressiveConfig) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, 2 * config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def inputs(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads [..., 2H], and the residual [..., H]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        return torch.cat((self.input_layernorm(embedding), normed), dim=-1), residual


class MtpLayer(DraftLayer):
    """A plain decoder layer over a projection of [embedding; hidden], both normed."""

    def __init__(self, config: AutoregressiveConfig) -> None:
        super().__init__(config)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def inputs(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads and the residual, [..., H] both."""
        mixed = self.eh_proj(torch.cat((self.enorm(embedding), self.hnorm(hidden)), dim=-1))
        return self.input_layernorm(mixed), mixed


class AutoregressiveNetwork(nn.Module):
    """The drafter as it is trained; tensor names are DeepSpec's for `eagle3`."""

    def __init__(self, config: AutoregressiveConfig) -> None:
        super().__init__()
        require_plain_rope(config)
        if config.num_hidden_layers != 1:
            raise ConfigError(
                f"a drafter of kind {config.kind} has one layer, not {config.num_hidden_layers}"
            )
        self.config = config
        h, num_taps = config.hidden_size, len(config.target_layer_ids)
        eagle = config.kind == "eagle3"
        if not eagle and num_taps != 1:
            raise ConfigError(f"a drafter of kind mtp has one tap, not {num_taps}")
        self.fc = nn.Linear(num_taps * h, h, bias=False) if eagle else None
        self.layers = nn.ModuleList([Eagle3Layer(config) if eagle else MtpLayer(config)])
        self.norm = RMSNorm(h, config.rms_norm_eps)
        self.lm_head = nn.Linear(h, config.output_size, bias=False) if config.has_own_head else None

    @property
    def layer(self) -> Eagle3Layer | MtpLayer:
        return cast(Eagle3Layer | MtpLayer, self.layers[0])

    def fuse(self, taps: Tensor) -> Tensor:
        """The hidden state that a row starts from. taps [..., n_taps · H] → [..., H]"""
        return taps if self.fc is None else self.fc(taps)

    def context_kv(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> KeysValues:
        """Keys and values of context rows. Embeddings of the tokens after them and fused taps [N, S, H];
        positions [N, S]."""
        rope = rope_tables(positions, self.config.head_dim, self.config.rope_theta)
        return self.layer.self_attn.project_kv(self.layer.inputs(embeddings, hidden)[0], rope)

    def forward(
        self, embeddings: Tensor, hidden: Tensor, positions: Tensor, past: KeysValues, visible: Tensor
    ) -> tuple[Tensor, KeysValues]:
        """One row of each block.

        Args: embeddings and hidden [N, T, H] of one row of T blocks; positions [N, T]; past, the S keys and
        values of the context and of earlier rows; visible [N, T, S + T] bool, the rows' own keys last. Gives
        the layer's output [N, T, H], which is the next row's hidden state, and past with the rows' own.
        """
        layer = self.layer
        rope = rope_tables(positions, self.config.head_dim, self.config.rope_theta)
        read, residual = layer.inputs(embeddings, hidden)
        past = join(past, layer.self_attn.project_kv(read, rope))
        attended = residual + layer.self_attn.attend(read, rope, past, additive_mask(visible, self.config))
        return attended + layer.mlp(layer.post_attention_layernorm(attended)), past

    def logits(self, output: Tensor, head_weight: Tensor) -> Tensor:
        """Draft logits of the layer's output: its own LM head's, or those of `head_weight` [Vd, H]."""
        return F.linear(self.norm(output), head_weight if self.lm_head is None else self.lm_head.weight)
