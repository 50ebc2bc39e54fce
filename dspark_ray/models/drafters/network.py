"""The DSpark drafter network: parallel backbone, Markov head, confidence head (DSpark paper, section 3).

One module serves training and inference. Its tensor names are DeepSpec's, so a `state_dict` is a checkpoint.
The embedding and the LM head belong to the target: they are arguments here, never parameters.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from dspark_ray.models.drafters.heads import MARKOV_HEADS, ConfidenceHead
from dspark_ray.models.drafters.layers import (
    DraftLayer,
    KeysValues,
    RMSNorm,
    additive_mask,
    require_plain_rope,
    rope_tables,
)
from dspark_ray.models.drafters.shape import DrafterShape


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DrafterShape):
    """Everything a checkpoint's config.json says about the drafter, under the paper's names.

    DFlash is the same network without heads: `markov_rank` 0, no confidence head, and in its published
    layout one slot more, whose masks predict their own position (`sample_from_anchor` False).
    """

    mask_token_id: int
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    sample_from_anchor: bool = True  # the anchor's slot predicts the first draft token

    @property
    def kind(self) -> str:
        """What serves it: without heads it is a DFlash drafter."""
        return "dspark" if self.markov_rank or self.enable_confidence_head else "dflash"

    def num_slots(self, num_tokens: int) -> int:
        """Rows (anchor and masks) that draft `num_tokens`; the last `num_tokens` of them predict."""
        return num_tokens if self.sample_from_anchor else num_tokens + 1


class DSparkNetwork(nn.Module):
    """The drafter. Slot k of a block [anchor, mask × (γ−1)] predicts the token at anchor + k + 1; with one
    mask more (`sample_from_anchor` False) the token at anchor + k, and the anchor's slot nothing."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        require_plain_rope(config)
        self.config = config
        h = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * h, h, bias=False)
        self.hidden_norm = RMSNorm(h, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(h, config.rms_norm_eps)
        sizes = (config.vocab_size, config.output_size, config.markov_rank, h)
        head_type = MARKOV_HEADS.get(config.markov_head_type)
        self.markov_head = head_type(*sizes) if config.markov_rank else None
        rank = config.markov_rank if config.confidence_head_with_markov else 0
        self.confidence_head = ConfidenceHead(h, rank) if config.enable_confidence_head else None

    def context(self, taps: Tensor) -> Tensor:
        """Fused taps: hidden_norm(fc(taps)). taps [..., n_taps · H] → [..., H]."""
        return self.hidden_norm(self.fc(taps))

    def context_kv(self, context: Tensor, positions: Tensor) -> list[KeysValues]:
        """Every layer's context keys and values. context [N, S, H], positions [N, S] absolute."""
        rope = rope_tables(positions, self.config.head_dim, self.config.rope_theta)
        layers = cast(Iterable[DraftLayer], self.layers)
        return [layer.self_attn.project_kv(context, rope) for layer in layers]

    def forward(
        self, embeddings: Tensor, positions: Tensor, context: list[KeysValues], visible: Tensor
    ) -> Tensor:
        """Hidden states of the slots, normed for the LM head.

        Args: embeddings [N, T, H] of block ids (a row may hold several blocks); positions [N, T] absolute;
        context, one pair a layer; visible [N, T, S + T] bool, True where a slot may look: the context before
        its anchor and its own block. Returns [N, T, H].
        """
        rope = rope_tables(positions, self.config.head_dim, self.config.rope_theta)
        mask = additive_mask(visible, self.config)
        hidden = embeddings
        for layer, layer_context in zip(self.layers, context, strict=True):
            hidden = layer(hidden, rope, layer_context, mask)
        return self.norm(hidden)

    def markov_embedding(self, previous: Tensor) -> Tensor | None:
        """W1[previous target ids] [..., r]; None without a sequential head."""
        return self.markov_head.markov_w1(previous) if self.markov_head else None

    def markov_features(self, embeddings: Tensor | None, hidden: Tensor) -> Tensor | None:
        """u of whole blocks, for `logits`. embeddings [..., γ, r], hidden [..., γ, H] → [..., γ, r]"""
        if self.markov_head is None or embeddings is None:
            return None
        return self.markov_head.unroll(embeddings, hidden)

    def logits(self, hidden: Tensor, head_weight: Tensor, features: Tensor | None) -> Tensor:
        """Draft logits: head rows of the draft vocabulary [Vd, H] applied to hidden, plus the bias W2 u."""
        logits = F.linear(hidden, head_weight)
        return logits if self.markov_head is None else logits + self.markov_head.markov_w2(features)

    def confidence_logit(self, hidden: Tensor, embedding: Tensor | None) -> Tensor:
        """Logit of the conditional acceptance of each slot. hidden [..., H] → [...]."""
        assert self.confidence_head is not None, "this drafter has no confidence head"
        return self.confidence_head(hidden, embedding)
