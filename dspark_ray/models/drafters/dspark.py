"""The DSpark and DFlash drafters at inference: paged context, a block forward a step, heads left to right.

`network.py` is the same network for training; a contract test holds the two together.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from dspark_kernels.attention import PagedBatch, block_attention
from dspark_kernels.choose import argmax, markov_chain
from dspark_kernels.draft import BlockDraft, Drafted, DraftNetwork, compiled_draft
from dspark_kernels.linear import PackedLinear
from dspark_kernels.norm import add_rms_norm, rms_norm
from dspark_kernels.rope import k_rope_store, qkv_rope
from dspark_kernels.stack import compiled_stack
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
    draft_vocabulary,
    drafter_rope,
    load_for_target,
)
from dspark_ray.models.drafters.heads import MARKOV_HEADS, MarkovHead
from dspark_ray.models.drafters.network import DSparkConfig
from dspark_ray.models.kv import KVStorage
from dspark_ray.models.targets.decoder import Decoder

PENDING_ROWS = 64
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
        self._pending: list[ContextRows] = []

    def compile(self, heads: "SequentialHeads") -> None:
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
        if (rows := self._take_pending()) is None:
            return
        if self.compiled is not None:
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
        ids = torch.full((len(requests), size), config.mask_token_id)  # made on the host, used on the device
        ids[:, 0] = torch.tensor([r.token_ids[-1] for r in requests])
        anchors = [len(r.token_ids) - 1 for r in requests]
        positions = torch.tensor(anchors).unsqueeze(1) + torch.arange(size)
        cos_sin = self.rope.at(positions.view(-1).to(self.target.device))
        self.store_pending()
        batch = self.pages.batch(requests, anchors, size)  # the keys before the anchor
        embedded = self.target.embedding[ids.view(-1).to(self.target.device)]
        hidden = self._all_layers(embedded, cos_sin, batch)
        return hidden.view(len(requests), size, -1)[:, size - num_tokens :]

    def _all_layers(self, embedded: Tensor, cos_sin: tuple[Tensor, Tensor], batch: PagedBatch) -> Tensor:
        """The final norm's output [N, H]."""
        config, eps, residual = self.config, self.config.rms_norm_eps, embedded
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


@dataclass(frozen=True, slots=True)
class ConfidenceVector:
    """The confidence head as a dot product, in fp32."""

    hidden: Tensor  # [H]
    markov: Tensor | None  # [r]
    bias: Tensor  # []


class SequentialHeads:
    """LM head rows, sequential head and confidence head, in the target's dtype."""

    def __init__(self, config: DSparkConfig, weights: Weights, target: Decoder) -> None:
        self.vocab_map, order = draft_vocabulary(config, weights)
        rows = target.head_weight if self.vocab_map is None else target.head_weight[self.vocab_map]
        self.head = PackedLinear(rows, None)  # [Vd, H] rows of the target's LM head
        self.markov: MarkovHead | None = None
        self.w1 = self.w2 = None  # [V, r], [r, Vd]
        if config.markov_rank:
            self.markov = _markov_head(config, weights, order)
            self.w1 = self.markov.markov_w1.weight.data
            # One copy of W2, in the layout of the compiled chain; the module looks at it transposed.
            self.w2 = self.markov.markov_w2.weight.data.t().contiguous()
            self.markov.markov_w2.weight.data = self.w2.t()
        self.confidence = _confidence_vector(config, weights) if config.enable_confidence_head else None
        self.has_compiled_chain = config.markov_head_type == "vanilla"

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> FloatArray | None:
        """w·[h_k; W1[x_{k−1}]] + b. hidden [R, n, H], previous [R, n] → [R, n]; None without the head."""
        head = self.confidence
        if head is None:
            return None
        logits = hidden.float() @ head.hidden
        if head.markov is not None and self.w1 is not None:
            logits = logits + self.w1[previous].float() @ head.markov
        return np.asarray((logits + head.bias).cpu().numpy(), dtype=np.float32)


class DSparkDrafter:
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
        chain, confidence_logits = self._chain(requests, len(requests[0].uniforms))
        rules = [r.sampling.rule for r in requests]
        notes = None
        if self._online is not None and chain.features is not None:
            confidences, notes = self._online(chain.features, confidence_logits, rules)
        else:
            assert self._head is not None
            assert confidence_logits is not None
            confidences = self._head(confidence_logits, rules)
        confidences = confidences * chain.open_slots.numpy()
        return DraftBlock(
            token_ids=chain.token_ids.tolist(),
            confidences=confidences,
            draft_probs=list(chain.draft_probs),
            confidence_logits=confidence_logits,
            notes=notes,
        )

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

    def _chain(self, requests: Sequence[DraftRequest], num_tokens: int) -> "tuple[_Chain, FloatArray | None]":
        """The pass and the sequential head over it; the confidence head's logits [R, n]."""
        plain = self.heads.has_compiled_chain and self._online is None
        fast = [i for i, r in enumerate(requests) if plain and r.sampling.greedy and r.adjuster is None]
        compiled = self.backbone.compiled
        if compiled is not None:
            greedy = len(fast) == len(requests)
            drafted = self.backbone.draft(compiled, requests, num_tokens, greedy=greedy)
            if greedy:
                chain = _one_hot(drafted.token_ids, drafted.previous)
                return chain, drafted.confidence_logits.numpy() if self.heads.confidence else None
            hidden, base = drafted.hidden, drafted.base
        else:
            hidden = self.backbone.forward(requests, num_tokens)  # [R, n, H]
            flat = hidden.reshape(-1, hidden.shape[-1])
            base = self.heads.head(flat).view(*hidden.shape[:2], -1)  # [R, n, Vd]
        chain = self._chosen(base, hidden, requests, fast)
        return chain, self.heads.confidence_logits(hidden, chain.previous)

    def _chosen(
        self, base: Tensor, hidden: Tensor, requests: Sequence[DraftRequest], fast: list[int]
    ) -> "_Chain":
        """The sequential head over base logits [R, n, Vd]; that of the greedy requests `fast` in one op."""
        anchors = torch.tensor([r.token_ids[-1] for r in requests]).to(base.device)
        if len(fast) == len(requests):
            return self._greedy_chain(base, anchors)
        slow = sorted(set(range(len(requests))) - set(fast))
        tokens = torch.empty(base.shape[:2], dtype=torch.int64)  # on the host, as what is open
        previous = torch.empty(base.shape[:2], dtype=torch.int64, device=base.device)
        open_slots = torch.ones(base.shape[:2], dtype=torch.bool)
        draft_probs: list[Tensor | None] = [None] * len(requests)
        slow_requests = [requests[i] for i in slow]
        if not fast:
            return self._stepwise_chain(base, hidden, anchors, slow_requests)
        for rows, chain in (
            (fast, self._greedy_chain(base[fast], anchors[fast])),
            (slow, self._stepwise_chain(base[slow], hidden[slow], anchors[slow], slow_requests)),
        ):
            tokens[rows], previous[rows] = chain.token_ids.cpu(), chain.previous
            open_slots[rows] = chain.open_slots
            for row, probs in zip(rows, chain.draft_probs, strict=True):
                draft_probs[row] = probs
        return _Chain(tokens, previous, open_slots, draft_probs)

    def _greedy_chain(self, base: Tensor, anchors: Tensor) -> "_Chain":
        heads = self.heads
        if heads.w1 is not None and heads.w2 is not None:
            return _one_hot(*markov_chain(base, heads.w1, heads.w2, anchors, heads.vocab_map))
        chosen = argmax(base.reshape(-1, base.shape[-1])).view(base.shape[:2])
        tokens = chosen if heads.vocab_map is None else heads.vocab_map[chosen]
        previous = torch.cat([anchors[:, None], tokens[:, :-1]], dim=1)
        return _one_hot(tokens, previous)

    def _stepwise_chain(
        self, base: Tensor, hidden: Tensor, anchors: Tensor, requests: Sequence[DraftRequest]
    ) -> "_Chain":
        """Slot by slot, the bias of each from the tokens chosen before it."""
        head = self.heads.markov
        w2 = None if self.heads.w2 is None else self.heads.w2.float()
        chooser = SlotChooser(
            requests,
            self.vocab_map,
            base.shape[-1],
            base.device,
            wants_features=self._online is not None,
        )
        state = None if head is None else head.start(len(requests))
        token, previous = anchors, []
        for slot in range(base.shape[1]):
            previous.append(token)
            logits = base[:, slot].to(torch.float32, copy=True)
            if head is not None and w2 is not None and state is not None:
                state, features = head.step(state, head.markov_w1(token), hidden[:, slot])
                logits += features.float() @ w2
            token = chooser.choose(logits)
        return _Chain(
            chooser.token_ids(),
            torch.stack(previous, dim=1),
            chooser.open_slots(),
            chooser.draft_probs(),
            chooser.features(),
        )


@dataclass(frozen=True, slots=True)
class _Chain:
    """What the sequential head chose."""

    token_ids: Tensor  # [R, n] target ids
    previous: Tensor  # [R, n] the token before each
    open_slots: Tensor  # [R, n] whether any token that can be drafted is allowed there (chain.py)
    draft_probs: Sequence[Tensor | None]  # R × [n, Vd]; None: one-hot
    features: FloatArray | None = None  # [R, n, 2] of the draft distributions, where they are learnt from


def _one_hot(token_ids: Tensor, previous: Tensor) -> _Chain:
    """Of likeliest tokens."""
    return _Chain(token_ids, previous, torch.ones(token_ids.shape, dtype=torch.bool), [None] * len(token_ids))


@DRAFTERS.register("dspark")
def _dspark(context: DrafterContext) -> DSparkDrafter:
    return DSparkDrafter(context)


@DRAFTERS.register("dflash")
def _dflash(context: DrafterContext) -> DSparkDrafter:
    return DSparkDrafter(context, "dflash")


def _markov_head(config: DSparkConfig, weights: Weights, order: Tensor | None) -> MarkovHead:
    """The head with W2's rows in the order of the draft vocabulary's target ids."""
    prefix = "markov_head."
    state = {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
    if order is not None:
        state["markov_w2.weight"] = state["markov_w2.weight"][order]
    with torch.device("meta"):
        head = MARKOV_HEADS.get(config.markov_head_type)(
            config.vocab_size, config.output_size, config.markov_rank, config.hidden_size
        )
    head.load_state_dict(state, assign=True)
    return head.requires_grad_(False)


def _confidence_vector(config: DSparkConfig, weights: Weights) -> ConfidenceVector:
    projection = weights["confidence_head.proj.weight"][0].float()
    h = config.hidden_size
    markov = projection[h:] if config.confidence_head_with_markov else None
    return ConfidenceVector(projection[:h], markov, weights["confidence_head.proj.bias"][0].float())
