"""The DSpark drafter at inference: fused weights, paged context, one block forward per step.

`network.py` is the same network for training; a contract test holds the two together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from dspark_kernels.activation import silu_mul
from dspark_kernels.attention import PagedBatch, block_attention
from dspark_kernels.choose import argmax, markov_chain
from dspark_kernels.linear import PackedLinear
from dspark_kernels.norm import add_rms_norm, rms_norm
from dspark_kernels.rope import k_rope_store, qkv_rope
from torch import Tensor

from dspark_ray.core.errors import CheckpointError, ConfigError
from dspark_ray.core.types import FloatArray
from dspark_ray.models.drafters.base import (
    DRAFTERS,
    ContextRows,
    DraftBlock,
    DrafterContext,
    DraftRequest,
    Outcome,
)
from dspark_ray.models.drafters.chain import SlotChooser
from dspark_ray.models.drafters.checkpoint import load_checkpoint
from dspark_ray.models.drafters.confidence import load_confidence
from dspark_ray.models.drafters.network import DSparkConfig
from dspark_ray.models.kv import KVStorage
from dspark_ray.models.rope import build_rope
from dspark_ray.models.targets.decoder import Decoder


class DraftLayerWeights:
    """One draft layer's fused weights; context K and V are projected for all layers at once elsewhere."""

    def __init__(self, weights: dict[str, Tensor], prefix: str, qk_norm: bool) -> None:
        def take(name: str) -> Tensor:
            return weights[f"{prefix}.{name}"]

        self.input_norm = take("input_layernorm.weight")
        self.qkv = PackedLinear(
            torch.cat([take(f"self_attn.{n}_proj.weight") for n in ("q", "k", "v")]), None
        )
        self.q_norm = take("self_attn.q_norm.weight") if qk_norm else None
        self.k_norm = take("self_attn.k_norm.weight") if qk_norm else None
        self.o = PackedLinear(take("self_attn.o_proj.weight"), None)
        self.post_norm = take("post_attention_layernorm.weight")
        self.gate_up = PackedLinear(torch.cat([take(f"mlp.{n}_proj.weight") for n in ("gate", "up")]), None)
        self.down = PackedLinear(take("mlp.down_proj.weight"), None)


class Backbone:
    """Context projection and the parallel forward over anchor and masks."""

    def __init__(self, config: DSparkConfig, weights: dict[str, Tensor], context: DrafterContext) -> None:
        assert isinstance(context.target, Decoder)
        self.config, self.target = config, context.target
        self.kv_block_size = context.kv_block_size
        layers = range(config.num_hidden_layers)
        self.layers = [DraftLayerWeights(weights, f"layers.{i}", config.qk_norm) for i in layers]
        self.fc = PackedLinear(weights["fc.weight"], None)
        self.context_norm = weights["hidden_norm.weight"]
        self.norm = weights["norm.weight"]
        projections = [weights[f"layers.{i}.self_attn.{n}_proj.weight"] for i in layers for n in ("k", "v")]
        self.context_kv = PackedLinear(torch.cat(projections), None)
        self.kv_width = 2 * config.num_key_value_heads * config.head_dim
        self.kv = KVStorage(
            len(self.layers),
            context.num_slots,
            config.num_key_value_heads,
            config.head_dim,
            self.target.dtype,
        )
        rope = {"rope_type": "default", "rope_theta": config.rope_theta, **config.rope_scaling}
        # A block may reach γ positions past the last one that is ever emitted.
        max_positions = context.max_positions + config.block_size
        self.rope = build_rope(rope, config.head_dim, max_positions, max_positions)
        self.scale = config.head_dim**-0.5

    def store_context(self, rows: ContextRows) -> None:
        """K and V of H_ctx = RMSNorm(W_c taps) for every layer, written to the rows' slots."""
        hidden = rms_norm(self.fc(rows.taps), self.context_norm, self.config.rms_norm_eps)
        kv = self.context_kv(hidden)
        cos, sin = self.rope.at(rows.positions)
        for index, layer in enumerate(self.layers):
            part = kv[:, index * self.kv_width : (index + 1) * self.kv_width]
            k_rope_store(
                part.contiguous(),
                cos,
                sin,
                self.config.num_key_value_heads,
                layer.k_norm,
                self.config.rms_norm_eps,
                *self.kv.layer(index),
                rows.slots,
            )

    def forward(self, requests: Sequence[DraftRequest], size: int) -> Tensor:
        """Hidden states [R, size, H] of the blocks [anchor, mask × (size − 1)]."""
        config, eps = self.config, self.config.rms_norm_eps
        ids = torch.full((len(requests), size), config.mask_token_id)
        ids[:, 0] = torch.tensor([r.token_ids[-1] for r in requests])
        anchors = torch.tensor([len(r.token_ids) - 1 for r in requests])
        cos, sin = self.rope.at((anchors.unsqueeze(1) + torch.arange(size)).view(-1))
        batch = self._paged(requests, anchors, size)
        residual = self.target.embedding[ids.view(-1)]
        normed = rms_norm(residual, self.layers[0].input_norm, eps)
        for index, layer in enumerate(self.layers):
            q, k, v = qkv_rope(
                layer.qkv(normed),
                cos,
                sin,
                config.num_attention_heads,
                config.num_key_value_heads,
                layer.q_norm,
                layer.k_norm,
                eps,
            )
            out = block_attention(q, k, v, *self.kv.layer(index), batch, self.scale)
            normed, residual = add_rms_norm(layer.o(out.view(len(out), -1)), residual, layer.post_norm, eps)
            mlp = layer.down(silu_mul(layer.gate_up(normed)))
            last = index + 1 == len(self.layers)
            next_norm = self.norm if last else self.layers[index + 1].input_norm
            normed, residual = add_rms_norm(mlp, residual, next_norm, eps)
        return normed.view(len(requests), size, -1)

    def _paged(self, requests: Sequence[DraftRequest], anchors: Tensor, size: int) -> PagedBatch:
        """Context of each request: the keys before its anchor."""
        used = [-(-(len(r.token_ids) - 1) // self.kv_block_size) for r in requests]
        tables = np.zeros((len(requests), max(1, *used) if used else 1), dtype=np.int32)
        for row, (request, count) in enumerate(zip(requests, used, strict=True)):
            tables[row, :count] = request.blocks[:count]
        return PagedBatch(
            query_start=torch.arange(0, (len(requests) + 1) * size, size, dtype=torch.int32),
            kv_len=anchors.to(torch.int32),
            block_tables=torch.from_numpy(tables),
            block_size=self.kv_block_size,
            max_query=size,
            max_kv=int(anchors.max()),
        )


@dataclass(frozen=True, slots=True)
class SequentialHeads:
    """Markov and confidence heads, applied left to right."""

    head: PackedLinear  # [Vd, H] rows of the target's LM head
    w1: Tensor | None  # [V, r]
    w2: Tensor | None  # [r, Vd]
    confidence_hidden: Tensor  # [H]
    confidence_markov: Tensor | None  # [r]
    confidence_bias: Tensor  # []
    vocab_map: Tensor | None  # [Vd] draft id → target id, ascending


@DRAFTERS.register("dspark")
class DSparkDrafter:
    """Semi-autoregressive drafting: logits_k = head(h_k) + W2 W1[x_{k−1}], left to right."""

    def __init__(self, context: DrafterContext) -> None:
        assert isinstance(context.target, Decoder)
        if context.path is None:
            raise ConfigError("speculation.drafter.path is required for kind 'dspark'")
        target = context.target
        config, weights = load_checkpoint(Path(context.path))
        _check_fits(config, target, context)
        weights = {name: t.to(target.dtype) if t.is_floating_point() else t for name, t in weights.items()}
        self.config = config
        self.num_draft_tokens = context.num_draft_tokens
        self.taps = config.target_layer_ids
        self.backbone = Backbone(config, weights, context)
        self.heads = _build_heads(config, weights, target)
        self.vocab_map = self.heads.vocab_map
        self._confidence = load_confidence(Path(context.path), context.temperatures, config.block_size)

    def commit(self, rows: ContextRows) -> None:
        self.backbone.store_context(rows)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn online: the confidence head is trained and calibrated."""

    def propose(self, requests: Sequence[DraftRequest]) -> DraftBlock:
        # A shorter block than the trained one drafts its first tokens as well as the whole block does
        # (LOG.md), and costs less: masks carry no information.
        hidden = self.backbone.forward(requests, len(requests[0].uniforms))  # [R, n, H]
        flat = hidden.reshape(-1, hidden.shape[-1])
        base = self.heads.head(flat).view(*hidden.shape[:2], -1)  # [R, n, Vd]
        chain = self._chain(base, requests)
        confidence_logits = self._confidence_logits(hidden, chain.previous)
        rules = [r.sampling.rule for r in requests]
        confidences = self._confidence(confidence_logits, rules) * chain.open_slots.numpy()
        return DraftBlock(
            token_ids=chain.token_ids.tolist(),
            confidences=confidences,
            draft_probs=list(chain.draft_probs),
            confidence_logits=confidence_logits,
        )

    def describe(self) -> str:
        c = self.config
        vocab = f"{c.output_size} of {c.vocab_size}" if c.draft_vocab_size else str(c.vocab_size)
        return (
            f"DSpark {c.num_hidden_layers} layers, taps {list(c.target_layer_ids)}, "
            f"γ={self.num_draft_tokens}, block {c.block_size}, Markov rank {c.markov_rank}, "
            f"draft vocabulary {vocab}, confidences {self._confidence.source}"
        )

    def _chain(self, base: Tensor, requests: Sequence[DraftRequest]) -> "_Chain":
        """The sequential head over base logits [R, γ, Vd]; plain greedy requests in one compiled op."""
        anchors = torch.tensor([r.token_ids[-1] for r in requests])
        stepwise = [i for i, r in enumerate(requests) if not r.sampling.greedy or r.adjuster is not None]
        if not stepwise:
            return self._greedy_chain(base, anchors)
        tokens = torch.empty(base.shape[:2], dtype=torch.int64)
        previous = torch.empty_like(tokens)
        open_slots = torch.ones(base.shape[:2], dtype=torch.bool)
        draft_probs: list[Tensor | None] = [None] * len(requests)
        others = set(stepwise)
        greedy = [i for i in range(len(requests)) if i not in others]
        for rows, chain in (
            (greedy, self._greedy_chain(base[greedy], anchors[greedy]) if greedy else None),
            (
                stepwise,
                self._stepwise_chain(base[stepwise], anchors[stepwise], [requests[i] for i in stepwise]),
            ),
        ):
            if chain is not None:
                tokens[rows], previous[rows] = chain.token_ids, chain.previous
                open_slots[rows] = chain.open_slots
                for row, probs in zip(rows, chain.draft_probs, strict=True):
                    draft_probs[row] = probs
        return _Chain(tokens, previous, open_slots, draft_probs)

    def _greedy_chain(self, base: Tensor, anchors: Tensor) -> "_Chain":
        heads = self.heads
        nothing: list[Tensor | None] = [None] * len(base)
        open_slots = torch.ones(base.shape[:2], dtype=torch.bool)
        if heads.w1 is not None and heads.w2 is not None:
            tokens, previous = markov_chain(base, heads.w1, heads.w2, anchors, heads.vocab_map)
            return _Chain(tokens, previous, open_slots, nothing)
        chosen = argmax(base.reshape(-1, base.shape[-1])).view(base.shape[:2])
        tokens = chosen if heads.vocab_map is None else heads.vocab_map[chosen]
        previous = torch.cat([anchors[:, None], tokens[:, :-1]], dim=1)
        return _Chain(tokens, previous, open_slots, nothing)

    def _stepwise_chain(self, base: Tensor, anchors: Tensor, requests: Sequence[DraftRequest]) -> "_Chain":
        """Slot by slot, for requests that draw or whose logits are shaped."""
        heads, chooser = self.heads, SlotChooser(requests, self.vocab_map, base.shape[-1])
        token, previous = anchors, []
        for slot in range(base.shape[1]):
            previous.append(token)
            logits = base[:, slot].to(torch.float32, copy=True)
            if heads.w1 is not None and heads.w2 is not None:
                logits += heads.w1[token].float() @ heads.w2.float()
            token = chooser.choose(logits)
        return _Chain(
            chooser.token_ids(), torch.stack(previous, dim=1), chooser.open_slots(), chooser.draft_probs()
        )

    def _confidence_logits(self, hidden: Tensor, previous: Tensor) -> FloatArray:
        """w·[h_k; W1[x_{k−1}]] + b. hidden [R, γ, H], previous [R, γ] → [R, γ] float32"""
        heads = self.heads
        logits = hidden.float() @ heads.confidence_hidden
        if heads.confidence_markov is not None and heads.w1 is not None:
            logits = logits + heads.w1[previous].float() @ heads.confidence_markov
        return np.asarray((logits + heads.confidence_bias).numpy(), dtype=np.float32)


@dataclass(frozen=True, slots=True)
class _Chain:
    """What the sequential head chose."""

    token_ids: Tensor  # [R, γ] target ids
    previous: Tensor  # [R, γ] the token before each
    open_slots: Tensor  # [R, γ] whether any token that can be drafted is allowed there (chain.py)
    draft_probs: Sequence[Tensor | None]  # R × [γ, Vd]; None: one-hot


def _check_fits(config: DSparkConfig, target: Decoder, context: DrafterContext) -> None:
    """The drafter was made for a target of this shape, and can draft as many tokens as asked."""
    t = target.config
    for name, have, want in (
        ("hidden_size", config.hidden_size, t.hidden_size),
        ("vocab_size", config.vocab_size, t.vocab_size),
        ("num_target_layers", config.num_target_layers, t.num_layers),
    ):
        if have != want:
            raise CheckpointError(f"{context.path}: the drafter's {name} is {have}, the target's is {want}")
    if context.num_draft_tokens > config.block_size:
        raise ConfigError(
            f"speculation.num_draft_tokens={context.num_draft_tokens} exceeds the drafter's block size "
            f"{config.block_size}; set it to at most {config.block_size}"
        )
    if not config.enable_confidence_head:
        raise CheckpointError(f"{context.path} has no confidence head, which adaptive verification needs")


def _build_heads(config: DSparkConfig, weights: dict[str, Tensor], target: Decoder) -> SequentialHeads:
    vocab_map, w2 = None, weights.get("markov_head.markov_w2.weight")
    head_weight = target.head_weight
    if config.draft_vocab_size is not None:
        vocab_map = torch.arange(config.draft_vocab_size) + weights["d2t"]  # d2t holds deltas
        order = vocab_map.argsort()  # ascending, so that a target id is found by bisection
        vocab_map = vocab_map[order]
        head_weight = head_weight[vocab_map]
        w2 = w2[order] if w2 is not None else None
    proj, bias = (
        weights["confidence_head.proj.weight"][0].float(),
        weights["confidence_head.proj.bias"][0].float(),
    )
    hidden = config.hidden_size
    return SequentialHeads(
        head=PackedLinear(head_weight, None),
        w1=weights.get("markov_head.markov_w1.weight"),
        w2=w2.t().contiguous() if w2 is not None else None,
        confidence_hidden=proj[:hidden],
        confidence_markov=proj[hidden:] if config.confidence_head_with_markov else None,
        confidence_bias=bias,
        vocab_map=vocab_map,
    )
