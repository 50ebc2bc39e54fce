"""One decoder for the Llama / Mistral / Qwen2 / Qwen3 family over paged KV and a flat ragged batch.

Weights that are read together are stored together (Q, K and V; gate and up), so that one row costs
little more than one pass over the weights.

With a `Collective`, a decoder is one rank's shard of the model: its heads, its part of the MLP and of the
vocabulary (targets/shard.py). Hidden states are the same on every rank, logits are rank 0's.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from dspark_kernels.activation import silu_mul
from dspark_kernels.attention import PagedBatch, paged_attention
from dspark_kernels.attention_libraries import PagedAttention
from dspark_kernels.linear import Fp8Linear, Int8Linear, PackedLinear
from dspark_kernels.norm import add_rms_norm, rms_norm
from dspark_kernels.rope import qkv_rope_store
from dspark_kernels.stack import compiled_stack
from torch import Tensor

from dspark_ray.core.errors import CheckpointError
from dspark_ray.core.types import AdapterRef
from dspark_ray.models.collective import Collective
from dspark_ray.models.kv import FLOAT8, KVStorage
from dspark_ray.models.quantized import open_weights
from dspark_ray.models.rope import build_rope
from dspark_ray.models.targets.config import TARGETS, DecoderConfig, read_decoder_config
from dspark_ray.models.targets.lora import Adapter, AdapterPack, AdapterRows, load_adapter
from dspark_ray.models.targets.shard import WHOLE, Shard, Span
from dspark_ray.models.weights import CPU, Part, WeightSource

__all__ = ["TARGETS", "Decoder", "DecoderConfig", "DecoderOutput", "load_target"]

Matrix = PackedLinear | Int8Linear | Fp8Linear
Linear = type[PackedLinear] | type[Int8Linear] | type[Fp8Linear]
LINEARS: dict[str, Linear] = {"none": PackedLinear, "int8": Int8Linear, "fp8": Fp8Linear}
"""model.quantization → how the matrices are kept."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    """What one forward pass leaves behind."""

    hidden: Tensor  # [N, H] after the final norm
    taps: Tensor  # [N, m·H] outputs of the tap layers, side by side; [N, 0] without taps
    logits: Tensor | None = None  # [M, V] of the rows that were asked for


class DecoderLayer:
    """Attention and MLP with their norms; holds fused, prepacked weights."""

    def __init__(
        self,
        config: DecoderConfig,
        source: WeightSource,
        index: int,
        dtype: torch.dtype,
        linear: Linear,
        collective: Collective | None = None,
    ) -> None:
        shard = shard_of(collective)
        self.config = shard.local(config)
        self.index = index
        self._collective = collective
        hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
        spans = shard.spans(config)
        columns = {
            "q": (config.num_heads * size, spans.q),
            "k": (config.num_kv_heads * size, spans.kv),
            "v": (config.num_kv_heads * size, spans.kv),
            "gate": (inner, spans.inner),
            "up": (inner, spans.inner),
        }

        def take(name: str, *shape: int, part: Part | None = None) -> Tensor:
            whole = collective is None
            return source.take(f"model.layers.{index}.{name}", shape, None if whole else part).to(dtype)

        def fuse(names: str, module: str, bias: bool) -> Matrix:
            """Column-parallel: each rank has some of the outputs."""
            weights, biases = [], []
            for name in names.split():
                rows, span = columns[name]
                weights.append(take(f"{module}.{name}_proj.weight", rows, hidden, part=span.along(0)))
                if bias:
                    biases.append(take(f"{module}.{name}_proj.bias", rows, part=span.along(0)))
            return linear(torch.cat(weights), torch.cat(biases) if biases else None)

        def sum_up(name: str, inputs: int, span: Span, bias: bool) -> Matrix:
            """Row-parallel: each rank has some of the inputs, and what they make is added up."""
            weight = take(f"{name}.weight", hidden, inputs, part=span.along(1))
            added = take(f"{name}.bias", hidden) if bias else None
            if collective is None:
                return linear(weight, added)
            added = added if shard.rank == 0 else None  # once in the sum
            if linear is PackedLinear:
                return PackedLinear(weight, added)
            # The scale of an output is that of its whole row.
            eight_bits = Fp8Linear if linear is Fp8Linear else Int8Linear
            return eight_bits(weight, added, collective.max(weight.float().abs().amax(dim=1)))

        self.input_norm = take("input_layernorm.weight", hidden)
        self.qkv = fuse("q k v", "self_attn", config.qkv_bias)
        self.q_norm = take("self_attn.q_norm.weight", size) if config.qk_norm else None
        self.k_norm = take("self_attn.k_norm.weight", size) if config.qk_norm else None
        self.o = sum_up("self_attn.o_proj", config.num_heads * size, spans.q, config.o_bias)
        self.post_norm = take("post_attention_layernorm.weight", hidden)
        self.gate_up = fuse("gate up", "mlp", config.mlp_bias)
        self.down = sum_up("mlp.down_proj", inner, spans.inner, config.mlp_bias)
        self.scale = config.head_dim**-0.5
        # Of a KV cache in float8.
        self.k_scale = self._kv_scale(source, "k_scale")
        self.v_scale = self._kv_scale(source, "v_scale")

    def _kv_scale(self, source: WeightSource, name: str) -> float:
        scale = source.take_number(f"model.layers.{self.index}.self_attn.{name}", 1.0)
        if not 0.0 < scale < float("inf"):
            raise CheckpointError(f"model.layers.{self.index}.self_attn.{name} is {scale}, no scale")
        return scale

    def attend(
        self,
        normed: Tensor,  # [N, H]
        cos_sin: tuple[Tensor, Tensor],  # each [N, D/2]
        cache: tuple[Tensor, Tensor],  # each [S, KV, D]
        slots: Tensor,  # [N]
        batch: PagedBatch,
        adapters: AdapterRows | None,
        attention: PagedAttention = paged_attention,
    ) -> Tensor:
        """The attention branch [N, H]; writes this layer's K and V of the rows to `slots`."""
        config = self.config
        q = qkv_rope_store(
            self._apply("qkv", self.qkv, normed, adapters),
            *cos_sin,
            config.num_heads,
            config.num_kv_heads,
            self.q_norm,
            self.k_norm,
            config.rms_norm_eps,
            *cache,
            slots,
            self.k_scale,
            self.v_scale,
        )
        in_float8 = cache[0].dtype == FLOAT8
        scale = self.scale * self.k_scale if in_float8 else self.scale
        out = attention(q, *cache, batch, scale, config.windows[self.index])
        if in_float8 and self.v_scale != 1.0:
            out = out.mul_(self.v_scale)
        return self._summed(self._apply("o", self.o, out.view(out.shape[0], -1), adapters))

    def mlp(self, normed: Tensor, adapters: AdapterRows | None) -> Tensor:
        """The SwiGLU branch, [N, H] → [N, H]."""
        inner = silu_mul(self._apply("gate_up", self.gate_up, normed, adapters))
        return self._summed(self._apply("down", self.down, inner, adapters))

    def _summed(self, out: Tensor) -> Tensor:
        return out if self._collective is None else self._collective.sum(out)

    def _apply(self, name: str, linear: Matrix, x: Tensor, adapters: AdapterRows | None) -> Tensor:
        out = linear(x)
        return out if adapters is None else adapters.add(self.index, name, x, out)


class Decoder:
    """The target model, inference only."""

    can_be_captured = True  # whether a pass may be recorded once and replayed

    def __init__(
        self,
        config: DecoderConfig,
        source: WeightSource,
        dtype: torch.dtype,
        max_positions: int,
        linear: Linear = PackedLinear,
        collective: Collective | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Takes every tensor from `source`; `CheckpointError` names what is missing or left over, and
        `ConfigError` says which numbers of ranks fit. All ranks are made at the same time. `kv_dtype`:
        float8, or the decoder's own."""
        self.config = config  # of the whole model
        self.dtype, self.kv_dtype = dtype, kv_dtype or dtype
        assert self.kv_dtype in (dtype, FLOAT8)
        self.device = source.device
        self.attention: PagedAttention = paged_attention  # where layers run one by one
        self._collective, shard = collective, shard_of(collective)
        self._whole = None if collective is None else source.whole
        self._local = shard.local(config)
        vocabulary = shard.vocabulary(config.vocab_size)
        self._first_token, self._num_rows = vocabulary.start, shard.vocabulary_rows(config.vocab_size)
        matrix = (config.vocab_size, config.hidden_size)
        part = None if collective is None else vocabulary.along(0)
        self._rows = self._padded(source.take(EMBEDDING, matrix, part).to(dtype))  # [V / ranks, H]
        self.layers = [
            DecoderLayer(config, source, index, dtype, linear, collective)
            for index in range(config.num_layers)
        ]
        self.norm = source.take("model.norm.weight", (config.hidden_size,)).to(dtype)
        stack = compiled_stack(
            self.layers,
            self.norm,
            num_heads=self._local.num_heads,
            num_kv_heads=self._local.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
        )
        self._stack = stack if collective is None else None  # which has no place for sums over ranks
        # The stack knows no windows: it takes batches whose contexts fit into all of them.
        self._stack_keys = min((w for w in config.windows if w is not None), default=max_positions)
        stored_head = source.take_optional(HEAD, matrix, part)
        if stored_head is None and not config.tie_word_embeddings:
            raise CheckpointError(f"{HEAD} is missing and config.json does not tie it to the embedding")
        self._is_tied = config.tie_word_embeddings or stored_head is None
        self._head_rows = self._rows  # [V / ranks, H]
        if stored_head is not None and not self._is_tied:
            self._head_rows = self._padded(stored_head.to(dtype))
        self.head = linear(self._head_rows, None)
        source.finish()
        self._computes_rows_alone = stack is not None and self.head.packed is not None
        self.rope = build_rope(
            config.rope, config.head_dim, config.max_position_embeddings, max_positions
        ).to(self.device)

    @cached_property
    def embedding(self) -> Tensor:
        """[V, H], whole: for drafters, which live on one rank. A shard reads it when it is first asked."""
        return self._rows if self._whole is None else self._whole(EMBEDDING).to(self.dtype)

    @cached_property
    def head_weight(self) -> Tensor:
        """[V, H], as `embedding`."""
        if self._whole is None:
            return self._head_rows
        return self.embedding if self._is_tied else self._whole(HEAD).to(self.dtype)

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a row's bits are the same in any batch: every op is compiled and computes a row alone, and
        ranks add up in the same order wherever a row stands."""
        in_order = self._collective is None or self._collective.keeps_order
        return self._computes_rows_alone and in_order and self.kv_dtype == self.dtype

    def _padded(self, rows: Tensor) -> Tensor:
        """A part of the vocabulary [≤ R, H], with zeros up to what every rank has [R, H]."""
        missing = self._num_rows - len(rows)
        return rows if missing == 0 else F.pad(rows, (0, 0, 0, missing))

    def new_kv(self, num_slots: int) -> KVStorage:
        """KV storage for `num_slots` tokens, of this rank's heads."""
        config = self._local
        return KVStorage(
            config.num_layers, num_slots, config.num_kv_heads, config.head_dim, self.kv_dtype, self.device
        )

    def load_adapter(self, ref: AdapterRef, max_rank: int) -> Adapter:
        """This rank's part of an adapter; for any thread. `CheckpointError` for one that cannot be served."""
        shard = shard_of(self._collective)
        return load_adapter(ref, self.config, self.dtype, max_rank, self.device, shard)

    def share_adapter(self, ref: AdapterRef, max_rank: int) -> None:
        """Comes before the first pack with it. `CheckpointError` where another rank cannot load it."""

    def pack_adapters(self, adapters: Sequence[Adapter], held: Collection[str]) -> AdapterPack:
        """Adapters for the next passes. `held`: digests of all that are still wanted."""
        return AdapterPack(adapters)

    def forward(
        self,
        token_ids: Tensor,  # [N] int64
        positions: Tensor,  # [N] int64
        kv: KVStorage,
        slots: Tensor,  # [N] int64, where the rows' K and V go
        batch: PagedBatch,
        taps: tuple[int, ...] = (),
        adapters: AdapterRows | None = None,
        logit_rows: Tensor | None = None,  # [M] int64
    ) -> DecoderOutput:
        """One pass over a flat ragged batch. The outputs of `taps` (0-based; -1: the embedding) are kept.
        `adapters`: where some row has one. `logit_rows`: whose logits are wanted with it.
        """
        cos_sin = self.rope.at(positions)
        embedded = self._embed(token_ids)
        inner_taps = tuple(sorted(tap for tap in taps if tap >= 0))
        stacked = self._stack is not None and kv.k.dtype == self.dtype
        if stacked and adapters is None and batch.max_kv <= self._stack_keys:
            assert self._stack is not None
            hidden, kept = self._stack(embedded, cos_sin, kv.k, kv.v, batch, slots=slots, taps=inner_taps)
        else:
            hidden, kept = self._layer_by_layer(embedded, cos_sin, kv, slots, batch, inner_taps, adapters)
        logits = None if logit_rows is None else self._logits(hidden[logit_rows])
        return DecoderOutput(hidden, torch.cat([embedded, kept], dim=1) if -1 in taps else kept, logits)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """[N] → [N, H]: each rank its own tokens, and zeros for the others' until they are added."""
        if self._collective is None:
            return self.embedding[token_ids]
        own = token_ids - self._first_token
        others = (own < 0) | (own >= self._num_rows)
        rows = self._rows[own.masked_fill(others, 0)]
        return self._collective.sum(rows.masked_fill_(others.unsqueeze(1), 0))

    def _layer_by_layer(
        self,
        embedded: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        kv: KVStorage,
        slots: Tensor,
        batch: PagedBatch,
        taps: tuple[int, ...],
        adapters: AdapterRows | None,
    ) -> tuple[Tensor, Tensor]:
        """What `LayerStack` does in one call where no row has an adapter: the final norm's output [N, H], and
        those of `taps`."""
        eps, residual = self.config.rms_norm_eps, embedded
        kept: list[Tensor] = []
        normed = rms_norm(residual, self.layers[0].input_norm, eps)
        for index, layer in enumerate(self.layers):
            attended = layer.attend(normed, cos_sin, kv.layer(index), slots, batch, adapters, self.attention)
            normed, residual = add_rms_norm(attended, residual, layer.post_norm, eps)
            last = index + 1 == len(self.layers)
            next_norm = self.norm if last else self.layers[index + 1].input_norm
            normed, residual = add_rms_norm(layer.mlp(normed, adapters), residual, next_norm, eps)
            if index in taps:
                kept.append(residual)
        return normed, torch.cat(kept, dim=1) if kept else residual[:, :0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, H] after the final norm → logits [M, V] in the model's dtype; values on rank 0 only."""
        return self._logits(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        if self._collective is None:
            return logits
        parts = self._collective.gather(logits) if len(hidden) else []
        whole = torch.cat(parts, dim=1) if parts else logits.new_empty(len(hidden), self.config.vocab_size)
        return whole[:, : self.config.vocab_size]


def shard_of(collective: Collective | None) -> Shard:
    """Which part of the model a decoder with this collective is."""
    return WHOLE if collective is None else Shard(collective.rank, collective.count)


def load_target(
    model_dir: Path,
    dtype: torch.dtype,
    max_positions: int,
    quantization: str = "none",
    collective: Collective | None = None,
    device: torch.device = CPU,
    kv_dtype: torch.dtype | None = None,
) -> Decoder:
    """The target in a Hugging Face directory, or one rank's shard of it; `quantization` as in the
    configuration, `kv_dtype` as of `Decoder`."""
    config = read_decoder_config(model_dir)
    source = open_weights(model_dir, device=device)
    return Decoder(config, source, dtype, max_positions, LINEARS[quantization], collective, kv_dtype)
