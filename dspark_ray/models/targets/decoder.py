"""One decoder for the Llama / Mistral / Qwen2 / Qwen3 family over paged KV and a flat ragged batch.

Weights that are read together are stored together (Q, K and V; gate and up), so that one row costs
little more than one pass over the weights.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from dspark_kernels.activation import silu_mul
from dspark_kernels.attention import PagedBatch, paged_attention
from dspark_kernels.linear import Int8Linear, PackedLinear
from dspark_kernels.norm import add_rms_norm, rms_norm
from dspark_kernels.rope import qkv_rope_store
from dspark_kernels.stack import compiled_stack
from torch import Tensor

from dspark_ray.core.errors import CheckpointError
from dspark_ray.models.kv import KVStorage
from dspark_ray.models.rope import build_rope
from dspark_ray.models.targets.config import TARGETS, DecoderConfig, read_decoder_config
from dspark_ray.models.targets.lora import AdapterRows
from dspark_ray.models.weights import WeightSource, load_safetensors

__all__ = ["TARGETS", "Decoder", "DecoderConfig", "DecoderOutput", "load_target"]

Linear = type[PackedLinear] | type[Int8Linear]
LINEARS: dict[str, Linear] = {"none": PackedLinear, "int8": Int8Linear}
"""model.quantization → how the matrices are kept."""


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    """What one forward pass leaves behind."""

    hidden: Tensor  # [N, H] after the final norm
    taps: Tensor  # [N, m·H] outputs of the tap layers, side by side; [N, 0] without taps


class DecoderLayer:
    """Attention and MLP with their norms; holds fused, prepacked weights."""

    def __init__(
        self, config: DecoderConfig, source: WeightSource, index: int, dtype: torch.dtype, linear: Linear
    ) -> None:
        self.config = config
        self.index = index
        head_rows = {
            "q": config.num_heads * config.head_dim,
            "k": config.num_kv_heads * config.head_dim,
            "v": config.num_kv_heads * config.head_dim,
        }
        hidden, inner = config.hidden_size, config.intermediate_size

        def take(name: str, *shape: int) -> Tensor:
            return source.take(f"model.layers.{index}.{name}", shape).to(dtype)

        def fuse(names: dict[str, int], module: str, bias: bool) -> PackedLinear | Int8Linear:
            weight = torch.cat([take(f"{module}.{n}_proj.weight", rows, hidden) for n, rows in names.items()])
            biases = [take(f"{module}.{n}_proj.bias", rows) for n, rows in names.items()] if bias else None
            return linear(weight, torch.cat(biases) if biases else None)

        self.input_norm = take("input_layernorm.weight", hidden)
        self.qkv = fuse(head_rows, "self_attn", config.qkv_bias)
        self.q_norm = take("self_attn.q_norm.weight", config.head_dim) if config.qk_norm else None
        self.k_norm = take("self_attn.k_norm.weight", config.head_dim) if config.qk_norm else None
        self.o = linear(
            take("self_attn.o_proj.weight", hidden, head_rows["q"]),
            take("self_attn.o_proj.bias", hidden) if config.o_bias else None,
        )
        self.post_norm = take("post_attention_layernorm.weight", hidden)
        self.gate_up = fuse({"gate": inner, "up": inner}, "mlp", config.mlp_bias)
        self.down = linear(
            take("mlp.down_proj.weight", hidden, inner),
            take("mlp.down_proj.bias", hidden) if config.mlp_bias else None,
        )
        self.scale = config.head_dim**-0.5

    def attend(
        self,
        normed: Tensor,  # [N, H]
        cos_sin: tuple[Tensor, Tensor],  # each [N, D/2]
        cache: tuple[Tensor, Tensor],  # each [S, KV, D]
        slots: Tensor,  # [N]
        batch: PagedBatch,
        adapters: AdapterRows | None,
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
        )
        out = paged_attention(q, *cache, batch, self.scale, config.windows[self.index])
        return self._apply("o", self.o, out.view(out.shape[0], -1), adapters)

    def mlp(self, normed: Tensor, adapters: AdapterRows | None) -> Tensor:
        """The SwiGLU branch, [N, H] → [N, H]."""
        inner = silu_mul(self._apply("gate_up", self.gate_up, normed, adapters))
        return self._apply("down", self.down, inner, adapters)

    def _apply(
        self, name: str, linear: PackedLinear | Int8Linear, x: Tensor, adapters: AdapterRows | None
    ) -> Tensor:
        out = linear(x)
        return out if adapters is None else adapters.add(self.index, name, x, out)


class Decoder:
    """The target model, inference only."""

    def __init__(
        self,
        config: DecoderConfig,
        source: WeightSource,
        dtype: torch.dtype,
        max_positions: int,
        linear: Linear = PackedLinear,
    ) -> None:
        """Takes every tensor from `source`; `CheckpointError` names what is missing or left over."""
        self.config = config
        self.dtype = dtype
        hidden, vocab = config.hidden_size, config.vocab_size
        self.embedding = source.take("model.embed_tokens.weight", (vocab, hidden)).to(dtype)
        self.layers = [
            DecoderLayer(config, source, index, dtype, linear) for index in range(config.num_layers)
        ]
        self.norm = source.take("model.norm.weight", (hidden,)).to(dtype)
        self._stack = compiled_stack(
            self.layers,
            self.norm,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
        )
        # The stack knows no windows: it takes batches whose contexts fit into all of them.
        self._stack_keys = min((w for w in config.windows if w is not None), default=max_positions)
        stored_head = source.take_optional("lm_head.weight", (vocab, hidden))
        if stored_head is None and not config.tie_word_embeddings:
            raise CheckpointError(
                "lm_head.weight is missing and config.json does not tie it to the embedding"
            )
        tied = config.tie_word_embeddings or stored_head is None
        self.head_weight = self.embedding if tied or stored_head is None else stored_head.to(dtype)  # [V, H]
        self.head = linear(self.head_weight, None)
        source.finish()
        self.rope = build_rope(config.rope, config.head_dim, config.max_position_embeddings, max_positions)

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a row's bits are the same in any batch: every op is compiled and computes a row alone."""
        return self._stack is not None and self.head.packed is not None

    def new_kv(self, num_slots: int) -> KVStorage:
        """KV storage for `num_slots` tokens."""
        config = self.config
        return KVStorage(config.num_layers, num_slots, config.num_kv_heads, config.head_dim, self.dtype)

    def forward(
        self,
        token_ids: Tensor,  # [N] int64
        positions: Tensor,  # [N] int64
        kv: KVStorage,
        slots: Tensor,  # [N] int64, where the rows' K and V go
        batch: PagedBatch,
        taps: tuple[int, ...] = (),
        adapters: AdapterRows | None = None,
    ) -> DecoderOutput:
        """One pass over a flat ragged batch. The outputs of `taps` (0-based; -1: the embedding) are kept.
        `adapters`: where some row has one.
        """
        cos_sin = self.rope.at(positions)
        embedded = self.embedding[token_ids]
        inner_taps = tuple(sorted(tap for tap in taps if tap >= 0))
        if self._stack is not None and adapters is None and batch.max_kv <= self._stack_keys:
            hidden, kept = self._stack(embedded, cos_sin, kv.k, kv.v, batch, slots=slots, taps=inner_taps)
        else:
            hidden, kept = self._layer_by_layer(embedded, cos_sin, kv, slots, batch, inner_taps, adapters)
        return DecoderOutput(hidden, torch.cat([embedded, kept], dim=1) if -1 in taps else kept)

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
            attended = layer.attend(normed, cos_sin, kv.layer(index), slots, batch, adapters)
            normed, residual = add_rms_norm(attended, residual, layer.post_norm, eps)
            last = index + 1 == len(self.layers)
            next_norm = self.norm if last else self.layers[index + 1].input_norm
            normed, residual = add_rms_norm(layer.mlp(normed, adapters), residual, next_norm, eps)
            if index in taps:
                kept.append(residual)
        return normed, torch.cat(kept, dim=1) if kept else residual[:, :0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, H] after the final norm → logits [M, V] in the model's dtype."""
        return self.head(hidden)


def load_target(
    model_dir: Path, dtype: torch.dtype, max_positions: int, quantization: str = "none"
) -> Decoder:
    """The target in a Hugging Face directory; `quantization` as in the configuration."""
    config = read_decoder_config(model_dir)
    source = WeightSource(load_safetensors(model_dir))
    return Decoder(config, source, dtype, max_positions, LINEARS[quantization])
