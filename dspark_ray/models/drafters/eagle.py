"""The EAGLE-3 and MTP drafters at inference: one layer, a token at a time, over paged context.

`autoregressive.py` is the same network for training; a contract test holds the two together. The context's
keys and values lie in the request's own blocks, row t at the slot of token t; those of a block's own rows
live for one `propose`. Row t depends on token t + 1: where a cached prefix was followed by another token,
the last row of the prefix is slightly off, which costs acceptance of one block and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from dspark_kernels.attention import block_attention
from dspark_kernels.linear import PackedLinear
from dspark_kernels.norm import add_rms_norm, rms_norm
from dspark_kernels.rope import k_rope_store, qkv_rope
from torch import Tensor

from dspark_ray.core.errors import CheckpointError
from dspark_ray.models.drafters.autoregressive import AutoregressiveConfig
from dspark_ray.models.drafters.base import (
    DRAFTERS,
    ContextRows,
    DraftBlock,
    DrafterContext,
    DraftRequest,
    Outcome,
)
from dspark_ray.models.drafters.chain import DeviceChooser, HostChooser
from dspark_ray.models.drafters.confidence import OnlineConfidence
from dspark_ray.models.drafters.fused import (
    ContextPages,
    LayerWeights,
    Weights,
    context_kv_weight,
    describe_vocabulary,
    draft_vocabulary,
    drafter_rope,
    load_for_target,
)
from dspark_ray.models.kv import KVStorage
from dspark_ray.models.targets.decoder import Decoder
from dspark_ray.models.transfer import all_to_host, to_device


@dataclass(slots=True)
class _Rows:
    """The rows of a block so far, one more a step. Lists of [R, 1, heads, D]."""

    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]


class FeedbackLayer:
    """The one layer with its input projection, over paged context."""

    def __init__(self, config: AutoregressiveConfig, weights: Weights, context: DrafterContext) -> None:
        assert isinstance(context.target, Decoder)
        self.config, self.embedding = config, context.target.embedding
        self.device = context.target.device
        self.pages = ContextPages(config, context)
        self.kv_block_size = context.kv_block_size
        self.layer = LayerWeights(weights, "layers.0", config.qk_norm)
        self.fc = PackedLinear(weights["fc.weight"], None) if "fc.weight" in weights else None
        eagle = config.kind == "eagle3"
        names = ("input_layernorm", "hidden_norm") if eagle else ("enorm", "hnorm")
        self.token_norm, self.hidden_norm = (weights[f"layers.0.{name}.weight"] for name in names)
        self.mix = None if eagle else PackedLinear(weights["layers.0.eh_proj.weight"], None)
        self.context_kv = context_kv_weight(weights, 1)
        kv_heads, dtype = config.num_key_value_heads, context.target.dtype
        self.kv = KVStorage(1, context.num_slots, kv_heads, config.head_dim, dtype, self.device)
        # The fused taps stay too: a block starts from those of its last committed row.
        self.hidden = torch.zeros(context.num_slots, config.hidden_size, dtype=dtype, device=self.device)
        self.rope = drafter_rope(config, context)
        self.scale = config.head_dim**-0.5

    def store_context(self, rows: ContextRows) -> None:
        """Fused taps, keys and values of committed rows, written to their slots."""
        fused = rows.taps if self.fc is None else self.fc(rows.taps)
        self.hidden[rows.slots] = fused
        read, _ = self._inputs(rows.next_token_ids, fused)
        config = self.config
        k_rope_store(
            self.context_kv(read),
            *self.rope.at(rows.positions),
            config.num_key_value_heads,
            self.layer.k_norm,
            config.rms_norm_eps,
            *self.kv.layer(0),
            rows.slots,
        )

    def first_hidden(self, requests: Sequence[DraftRequest]) -> Tensor:
        """Fused taps of the last row before each anchor. [R, H]"""
        size = self.kv_block_size
        rows = [len(r.token_ids) - 2 for r in requests]
        assert min(rows) >= 0, "an anchor has a token before it"
        slots = [r.blocks[row // size] * size + row % size for r, row in zip(requests, rows, strict=True)]
        return self.hidden[to_device(torch.tensor(slots), self.device)]

    def step(
        self, requests: Sequence[DraftRequest], tokens: Tensor, hidden: Tensor, past: _Rows
    ) -> tuple[Tensor, Tensor]:
        """One more row of each block. tokens [R], hidden [R, H] → the MLP's output and its residual, [R, H]
        both: their sum is the layer's output."""
        config, layer, eps = self.config, self.layer, self.config.rms_norm_eps
        count, index = len(requests), len(past.queries)
        context_lens = [len(r.token_ids) - 2 for r in requests]
        positions = to_device(torch.tensor(context_lens) + index, self.device)
        read, residual = self._inputs(tokens, hidden)
        q, k, v = qkv_rope(
            layer.qkv(read),
            *self.rope.at(positions),
            config.num_attention_heads,
            config.num_key_value_heads,
            layer.q_norm,
            layer.k_norm,
            eps,
        )
        for rows, new in ((past.queries, q), (past.keys, k), (past.values, v)):
            rows.append(new.unsqueeze(1))
        # The op lets every row of a block see the whole block, so earlier rows would now see this one: they
        # are computed along and thrown away. With γ rows that is cheaper than a cache for rows of one block.
        queries, keys, values = (
            torch.cat(rows, dim=1).flatten(0, 1) for rows in (past.queries, past.keys, past.values)
        )
        batch = self.pages.batch(requests, context_lens, index + 1)
        if self.device.type != "cpu":
            batch = batch.to(self.device)
        out = block_attention(queries, keys, values, *self.kv.layer(0), batch, self.scale)
        last = out.view(count, index + 1, -1)[:, -1]
        normed, residual = add_rms_norm(layer.o(last.contiguous()), residual, layer.post_norm, eps)
        return layer.mlp(normed), residual

    def _inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and the residual. tokens [N], hidden [N, H]"""
        eps = self.config.rms_norm_eps
        normed_hidden = rms_norm(hidden, self.hidden_norm, eps)
        joined = torch.cat((rms_norm(self.embedding[tokens], self.token_norm, eps), normed_hidden), dim=-1)
        if self.mix is not None:
            mixed = self.mix(joined)
            return rms_norm(mixed, self.layer.input_norm, eps), mixed
        return joined, normed_hidden if self.config.norm_before_residual else hidden


class AutoregressiveDrafter:
    """Drafts token after token, each from the layer's own output of the one before."""

    def __init__(self, context: DrafterContext, kind: str) -> None:
        config, weights, target = load_for_target(context, kind)
        if not isinstance(config, AutoregressiveConfig) or config.kind != kind:
            raise CheckpointError(f"{context.path} holds a drafter of kind {config.kind!r}, not {kind!r}")
        self.config = config
        self.num_draft_tokens = context.num_draft_tokens
        self.taps = config.target_layer_ids
        self.layer = FeedbackLayer(config, weights, context)
        self.context_digests: tuple[str, ...] = (self.layer.pages.digest,)
        self.norm = weights["norm.weight"]
        self.vocab_map, order = draft_vocabulary(config, weights)
        if config.has_own_head:
            rows = weights["lm_head.weight"]
            self.head = PackedLinear(rows if order is None else rows[order], None)
        else:
            rows = target.head_weight
            self.head = PackedLinear(rows if self.vocab_map is None else rows[self.vocab_map], None)
        self._confidence = OnlineConfidence(config.block_size, None)
        self.chooses_on_device = True  # False: slot by slot on the host, as with rules; tests compare

    def commit(self, rows: ContextRows) -> None:
        self.layer.store_context(rows)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self._confidence.observe(outcomes)

    def wants_full_verification(self) -> bool:
        return self._confidence.wants_full_verification()

    def propose(self, requests: Sequence[DraftRequest]) -> DraftBlock:
        num_tokens, eps = len(requests[0].uniforms), self.config.rms_norm_eps
        has_rules = any(r.adjuster is not None for r in requests)
        chooser = (DeviceChooser if self.chooses_on_device and not has_rules else HostChooser)(
            requests, self.vocab_map, self.config.output_size, self.layer.device, wants_features=True
        )
        tokens = to_device(torch.tensor([r.token_ids[-1] for r in requests]), self.layer.device)
        hidden, past = self.layer.first_hidden(requests), _Rows([], [], [])
        for _ in range(num_tokens):
            # The sum is the next row's hidden state, and its norm what the LM head reads.
            normed, hidden = add_rms_norm(*self.layer.step(requests, tokens, hidden, past), self.norm, eps)
            tokens = chooser.choose(self.head(normed).float())
        token_ids, features = all_to_host(chooser.token_ids(), chooser.features())
        assert token_ids is not None
        assert features is not None
        rules = [r.sampling.rule for r in requests]
        confidences, notes = self._confidence(features.numpy(), None, rules)
        return DraftBlock(
            token_ids=token_ids.tolist(),
            confidences=confidences * chooser.open_slots().numpy(),
            draft_probs=chooser.draft_probs(),
            notes=notes,
        )

    def describe(self) -> str:
        c = self.config
        return (
            f"{c.kind}, taps {list(c.target_layer_ids)}, γ={self.num_draft_tokens}, horizon {c.block_size}, "
            f"draft vocabulary {describe_vocabulary(c)}, confidences {self._confidence.source}"
        )


@DRAFTERS.register("eagle3")
def _eagle3(context: DrafterContext) -> AutoregressiveDrafter:
    return AutoregressiveDrafter(context, "eagle3")


@DRAFTERS.register("mtp")
def _mtp(context: DrafterContext) -> AutoregressiveDrafter:
    return AutoregressiveDrafter(context, "mtp")
