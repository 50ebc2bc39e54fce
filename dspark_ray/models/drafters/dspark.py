"""The DSpark and DFlash drafters at inference: paged context, a block forward a step, heads left to right.

`network.py` is the same network for training; a contract test holds the two together.
"""

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from dspark_kernels.attention import block_attention
from dspark_kernels.draft import BlockDraft, Drafted, DraftNetwork, compiled_draft
from dspark_kernels.linear import PackedLinear
from dspark_kernels.norm import add_rms_norm, rms_norm
from dspark_kernels.rope import k_rope_store, qkv_rope
from dspark_kernels.stack import compiled_stack
from torch import Tensor

from dspark_ray.core.errors import CheckpointError, ConfigError
from dspark_ray.models.drafters.base import (
    DRAFTERS,
    ContextRows,
    DeviceBlock,
    DeviceDrafter,
    DeviceRequests,
    DraftBlock,
    DrafterContext,
    DraftRequest,
    Outcome,
)
from dspark_ray.models.drafters.confidence import (
    CalibratedConfidence,
    OnlineConfidence,
    load_confidence,
)
from dspark_ray.models.drafters.fused import (
    ContextPages,
    LayerWeights,
    Weights,
    context_kv_weight,
    describe_vocabulary,
    drafter_rope,
    load_for_target,
)
from dspark_ray.models.drafters.network import DSparkConfig
from dspark_ray.models.drafters.sequential import Chain, SequentialHeads, one_hot
from dspark_ray.models.graphs import Capturer, FlatRows, GraphRunner, PassLimits
from dspark_ray.models.kv import KVStorage
from dspark_ray.models.targets.decoder import Decoder
from dspark_ray.models.transfer import all_to_host

PENDING_ROWS = 256
"""Context rows that wait for each other while nothing is drafted, so that weights are read once for all."""


def _joined(parts: Sequence[ContextRows]) -> ContextRows:
    """In one piece. A slot that changed hands meanwhile keeps its last row only."""
    if len(parts) == 1:
        return parts[0]
    joined = ContextRows(*(torch.cat(fields) for fields in zip(*map(_fields, parts), strict=True)))
    last = {slot: row for row, slot in enumerate(joined.slots.tolist())}
    if len(last) == len(joined.slots):
        return joined
    kept = torch.tensor(sorted(last.values()), device=joined.slots.device)
    return ContextRows(*(field[kept] for field in _fields(joined)))


def _fields(rows: ContextRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return rows.taps, rows.positions, rows.slots, rows.next_token_ids


class Backbone:
    """Context projection and the parallel forward over anchor and masks."""

    def __init__(self, config: DSparkConfig, weights: Weights, context: DrafterContext) -> None:
        assert isinstance(context.target, Decoder)
        self.config, self.target = config, context.target
        self.pages = ContextPages(config, context)
        layers = range(config.num_hidden_layers)
        self.layers = [LayerWeights(weights, f"layers.{i}", config.qk_norm) for i in layers]
        self.fc = PackedLinear(weights["fc.weight"], None)
        self.context_norm = weights["hidden_norm.weight"]
        self.norm = weights["norm.weight"]
        self.context_kv = context_kv_weight(weights, len(self.layers))
        self.kv_width = 2 * config.num_key_value_heads * config.head_dim
        self.kv = KVStorage(
            len(self.layers),
            context.num_slots,
            config.num_key_value_heads,
            config.head_dim,
            self.target.dtype,
            self.target.device,
        )
        self.rope = drafter_rope(config, context)
        self.scale = config.head_dim**-0.5
        self.compiled: BlockDraft | None = None  # the whole pass in one call, see `compile`
        self.graphs: GraphRunner[None, Tensor] | None = None  # see `use_graphs`
        self._largest_block = config.num_slots(context.num_draft_tokens)
        self._max_positions = context.max_positions
        self._pending: list[ContextRows] = []

    def use_graphs(self, capturer: Capturer, max_requests: int) -> None:
        """Passes of up to so many requests run from captured ones."""
        limits = PassLimits(
            most_rows=max_requests * self._largest_block,
            max_query=self._largest_block,
            max_kv=self._max_positions,
            block_size=self.pages.block_size,
        )
        self.graphs = GraphRunner(lambda rows, _: self._pass(rows), limits, self.target.device, capturer)

    def compile(self, heads: SequentialHeads) -> None:
        """Joins backbone and heads in one call where the compiled library carries them."""
        config, confidence = self.config, heads.confidence
        stack = compiled_stack(
            self.layers,
            self.norm,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
        )
        if stack is None:
            return
        network = DraftNetwork(
            fc=self.fc,
            context_norm=self.context_norm,
            context_kv=self.context_kv,
            embedding=self.target.embedding,
            head=heads.head,
            w1=heads.w1,
            w2=heads.w2,
            vocab_map=heads.vocab_map,
            confidence_hidden=None if confidence is None else confidence.hidden,
            confidence_markov=None if confidence is None else confidence.markov,
            confidence_bias=0.0 if confidence is None else float(confidence.bias),
            mask_token_id=config.mask_token_id,
        )
        self.compiled = compiled_draft(stack, network, (self.rope.cos, self.rope.sin), (self.kv.k, self.kv.v))

    def add_context(self, rows: ContextRows) -> None:
        """Notes rows that drafts will look at, and stores what has come together of them."""
        self._pending.append(rows)
        if sum(len(part.slots) for part in self._pending) >= PENDING_ROWS:
            self.store_pending()

    def store_pending(self) -> None:
        """Must come before a draft."""
        if self.target.device.type != "cpu":
            parts, self._pending = self._pending, []
            for part in parts:  # to join them, their slots would have to be read
                self._store(part)
        elif (rows := self._take_pending()) is None:
            return
        elif self.compiled is not None:
            self.compiled.store(rows.taps, rows.positions, rows.slots)
        else:
            self._store(rows)

    def _take_pending(self) -> ContextRows | None:
        if not self._pending:
            return None
        rows, self._pending = _joined(self._pending), []
        return rows

    def _store(self, rows: ContextRows) -> None:
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

    def draft(
        self, compiled: BlockDraft, requests: Sequence[DraftRequest], num_tokens: int, *, greedy: bool
    ) -> Drafted:
        """What `forward` and the heads do, in one call; of greedy requests the chain and confidences, too."""
        ends = [len(r.token_ids) - 1 for r in requests]
        rows = self._take_pending()
        tables, lengths = self.pages.tables(requests, ends)
        return compiled(
            None if rows is None else (rows.taps, rows.positions, rows.slots),
            np.array([r.token_ids[-1] for r in requests], dtype=np.int64),
            np.array(ends, dtype=np.int64),
            tables,
            lengths,
            self.pages.block_size,
            block=self.config.num_slots(num_tokens),
            wanted=num_tokens,
            greedy=greedy,
        )

    def forward(self, requests: Sequence[DraftRequest], num_tokens: int) -> Tensor:
        """Hidden states [R, num_tokens, H] of the slots that predict, in blocks [anchor, mask, mask, …]."""
        config = self.config
        size = config.num_slots(num_tokens)
        ids = torch.full((len(requests), size), config.mask_token_id)
        ids[:, 0] = torch.tensor([r.token_ids[-1] for r in requests])
        anchors = [len(r.token_ids) - 1 for r in requests]
        positions = torch.tensor(anchors).unsqueeze(1) + torch.arange(size)
        self.store_pending()
        paged = self.pages.batch(requests, anchors, size)  # the keys before the anchor
        rows = FlatRows(ids.view(-1), positions.view(-1), None, paged)
        return self._hidden(rows, size).view(len(requests), size, -1)[:, size - num_tokens :]

    def forward_on_device(self, requests: DeviceRequests) -> Tensor:
        """As `forward`."""
        config, anchors, count = self.config, requests.anchors, len(requests.anchors)
        size = config.num_slots(requests.num_tokens)
        masks = torch.full((count, size - 1), config.mask_token_id, device=anchors.device)
        ids = torch.cat([anchors[:, None], masks], dim=1)
        positions = requests.positions[:, None] + torch.arange(size, device=anchors.device)
        # A request that has ended on the device, which the host does not know yet, may stand past the end.
        positions = positions.clamp(max=len(self.rope.cos) - 1)
        self.store_pending()
        rows = FlatRows(ids.view(-1), positions.view(-1), None, self.pages.batch_on_device(requests, size))
        return self._hidden(rows, size).view(count, size, -1)[:, size - requests.num_tokens :]

    def _hidden(self, rows: FlatRows, size: int) -> Tensor:
        """Blocks of `size` rows through the pass, captured or not. → [N, H]"""
        count = len(rows.token_ids)
        if self.graphs is not None and self.graphs.takes(count, size):
            return self.graphs.run(rows, None)[1][:count]
        return self._pass(rows.to(self.target.device))

    def _pass(self, rows: FlatRows) -> Tensor:
        """The final norm's output [N, H]. Nothing is stored."""
        cos_sin, batch = self.rope.at(rows.positions), rows.paged
        config, eps, residual = self.config, self.config.rms_norm_eps, self.target.embedding[rows.token_ids]
        normed = rms_norm(residual, self.layers[0].input_norm, eps)
        for index, layer in enumerate(self.layers):
            q, k, v = qkv_rope(
                layer.qkv(normed),
                *cos_sin,
                config.num_attention_heads,
                config.num_key_value_heads,
                layer.q_norm,
                layer.k_norm,
                eps,
            )
            out = block_attention(q, k, v, *self.kv.layer(index), batch, self.scale)
            normed, residual = add_rms_norm(layer.o(out.view(len(out), -1)), residual, layer.post_norm, eps)
            last = index + 1 == len(self.layers)
            next_norm = self.norm if last else self.layers[index + 1].input_norm
            normed, residual = add_rms_norm(layer.mlp(normed), residual, next_norm, eps)
        return normed


class DSparkDrafter(DeviceDrafter):
    """Semi-autoregressive drafting: logits_k = head(h_k) + W2 u_k, left to right; DFlash has no u_k."""

    def __init__(self, context: DrafterContext, kind: str = "dspark") -> None:
        config, weights, target = load_for_target(context, kind)
        if not isinstance(config, DSparkConfig) or config.kind != kind:
            raise CheckpointError(f"{context.path} holds a drafter of kind {config.kind!r}, not {kind!r}")
        self.config = config
        self.num_draft_tokens = context.num_draft_tokens
        self.taps = config.target_layer_ids
        self.backbone = Backbone(config, weights, context)
        self.heads = SequentialHeads(config, weights, target)
        self.backbone.compile(self.heads)
        self.vocab_map = self.heads.vocab_map
        self.context_digests: tuple[str, ...] = (self.backbone.pages.digest,)
        self._path = Path(str(context.path))
        self._head: CalibratedConfidence | None = None
        if self.heads.confidence is not None:
            self._head = load_confidence(self._path, context.temperatures, config.block_size)
        learns = self._head is None or context.confidence == "online"
        self._online = OnlineConfidence(config.block_size, self._head) if learns else None

    def commit(self, rows: ContextRows) -> None:
        self.backbone.add_context(rows)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        if self._online is not None:
            self._online.observe(outcomes)

    def wants_full_verification(self) -> bool:
        return self._online is not None and self._online.wants_full_verification()

    def propose(self, requests: Sequence[DraftRequest]) -> DraftBlock:
        # A shorter block than the trained one drafts its first tokens as well as the whole block does
        # (LOG.md), and costs less: masks carry no information.
        chain, logits = self._chain(requests, len(requests[0].uniforms))
        token_ids, logits, features = all_to_host(chain.token_ids, logits, chain.features)
        assert token_ids is not None
        confidence_logits = None if logits is None else logits.numpy()
        rules = [r.sampling.rule for r in requests]
        notes = None
        if self._online is not None and features is not None:
            confidences, notes = self._online(features.numpy(), confidence_logits, rules)
        else:
            assert self._head is not None
            assert confidence_logits is not None
            confidences = self._head(confidence_logits, rules)
        confidences = confidences * chain.open_slots.numpy()
        return DraftBlock(
            token_ids=token_ids.tolist(),
            confidences=confidences,
            draft_probs=list(chain.draft_probs),
            confidence_logits=confidence_logits,
            notes=notes,
        )

    @property
    def drafts_on_device(self) -> bool:
        return self._online is None  # which learns on the host

    def propose_on_device(self, requests: DeviceRequests) -> DeviceBlock:
        assert self._head is not None
        hidden = self.backbone.forward_on_device(requests)  # [R, n, H]
        flat = hidden.reshape(-1, hidden.shape[-1])
        base = self.heads.head(flat).view(*hidden.shape[:2], -1)  # [R, n, Vd]
        tokens, previous, probs = self.heads.draft_on_device(base, hidden, requests)
        logits = self.heads.confidence_logits(hidden, previous)
        assert logits is not None
        return DeviceBlock(tokens, self._head.on_device(logits, requests.rules), probs)

    def use_graphs(self, capturer: Capturer, max_requests: int) -> None:
        self.backbone.use_graphs(capturer, max_requests)

    def capture_all(self) -> None:
        assert self.backbone.graphs is not None, "`use_graphs` comes first"
        self.backbone.graphs.capture_all(None)

    def with_temperatures(self, path: Path) -> "DSparkDrafter":
        if self._head is None:
            raise ConfigError(f"{self._path} has no confidence head, so it has no temperatures")
        other = copy.copy(self)
        other._head = load_confidence(self._path, str(path), self.config.block_size)
        if self._online is not None:
            other._online = OnlineConfidence(self.config.block_size, other._head)
        return other

    def describe(self) -> str:
        c = self.config
        heads = (
            f"{c.markov_head_type} head of rank {c.markov_rank}" if c.markov_rank else "no sequential head"
        )
        confidence = self._online or self._head
        source = "none" if confidence is None else confidence.source
        return (
            f"{c.kind} {c.num_hidden_layers} layers, taps {list(c.target_layer_ids)}, "
            f"γ={self.num_draft_tokens}, block {c.block_size}, {heads}, "
            f"draft vocabulary {describe_vocabulary(c)}, confidences {source}"
        )

    def _chain(self, requests: Sequence[DraftRequest], num_tokens: int) -> tuple[Chain, Tensor | None]:
        """The pass and the sequential head over it; the confidence head's logits [R, n]."""
        compiled, wants_features = self.backbone.compiled, self._online is not None
        if compiled is not None:
            greedy = all(self.heads.chooser_of(r, wants_features) is None for r in requests)
            drafted = self.backbone.draft(compiled, requests, num_tokens, greedy=greedy)
            if greedy:
                logits = drafted.confidence_logits if self.heads.confidence else None
                return one_hot(drafted.token_ids, drafted.previous), logits
            hidden, base = drafted.hidden, drafted.base
        else:
            hidden = self.backbone.forward(requests, num_tokens)  # [R, n, H]
            flat = hidden.reshape(-1, hidden.shape[-1])
            base = self.heads.head(flat).view(*hidden.shape[:2], -1)  # [R, n, Vd]
        chain = self.heads.draft(base, hidden, requests, wants_features=wants_features)
        return chain, self.heads.confidence_logits(hidden, chain.previous)


@DRAFTERS.register("dspark")
def _dspark(context: DrafterContext) -> DSparkDrafter:
    return DSparkDrafter(context)


@DRAFTERS.register("dflash")
def _dflash(context: DrafterContext) -> DSparkDrafter:
    return DSparkDrafter(context, "dflash")
