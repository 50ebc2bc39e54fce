"""What a config.json says about sizes: parameters, bytes of weights, bytes of KV. Pure arithmetic.

Exact for dense decoders up to norms and biases. DeepSeek-V4 is counted by its matrices (experts in MXFP4,
the rest in FP8), its KV by the rows that vLLM keeps; both are good to a few percent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dspark_ray.core.errors import ConfigError

_V4_ROW_BYTES = 584  # FP8 latent 448, bf16 rope 2 × 64, scales 8
_V4_INDEXED_RATIO = 4  # layers that compress by so much choose their rows through an index
_V4_INDEX_ROW_BYTES = 132  # FP8 128 and a scale
_MXFP4_BYTES = 4.25 / 8  # 4 bits and a shared 8-bit exponent for 32 values
_FP8_BYTES = 1.0

KvBytes = Callable[[int], float]
"""tokens of one sequence → bytes of its KV in all layers, undivided."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model as the checks need it."""

    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_positions: int | None
    num_experts: int
    head_groups: int  # that tensor parallelism must divide, beside the heads
    weight_bytes: float
    kv_bytes: KvBytes
    intermediate_size: int | None = None  # of a dense MLP

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0


def read_shape(raw: dict[str, Any], dtype_bytes: int) -> Shape:
    """Raises `ConfigError` for a config.json without the sizes that every model has."""
    config = _text_part(raw)
    try:
        if config.get("model_type") == "deepseek_v4":
            return _deepseek_v4(config)
        return _decoder(config, dtype_bytes)
    except KeyError as error:
        raise ConfigError(f"the model's config.json has no {error.args[0]}") from error


def _text_part(raw: dict[str, Any]) -> dict[str, Any]:
    """The decoder of a model that sees or hears; the backbone of a checkpoint in speculators' format."""
    nested = raw.get("text_config") or raw.get("transformer_layer_config")
    outer = {key: raw[key] for key in ("tie_word_embeddings", "_weight_bytes") if key in raw}
    return outer | nested if nested else raw


def _decoder(c: dict[str, Any], dtype_bytes: int) -> Shape:
    """Llama, Mistral, Qwen2, Qwen3 and Gemma: attention with grouped queries, a gated MLP, maybe windows."""
    hidden, layers, heads = c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"]
    kv_heads = c.get("num_key_value_heads") or heads
    head_dim = c.get("head_dim") or hidden // heads
    kinds = c.get("layer_types") or ["full_attention"] * layers
    window = c.get("sliding_window")
    wide_dim = c.get("global_head_dim") or head_dim
    wide_kv_heads = c.get("num_global_key_value_heads") or kv_heads
    num_full = sum(kind == "full_attention" for kind in kinds[:layers])
    num_windowed = layers - num_full
    kv_matrices = 1 if c.get("attention_k_eq_v") else 2

    def attention(dim: int, kv: int, matrices: int) -> int:
        return hidden * dim * (2 * heads + matrices * kv)

    embeddings = c["vocab_size"] * hidden * (1 if c.get("tie_word_embeddings") else 2)
    parameters = (
        embeddings
        + num_full * attention(wide_dim, wide_kv_heads, kv_matrices)
        + num_windowed * attention(head_dim, kv_heads, 2)
        + layers * 3 * hidden * c["intermediate_size"]
    )
    full_bytes = 2 * num_full * wide_kv_heads * wide_dim * dtype_bytes
    window_bytes = 2 * num_windowed * kv_heads * head_dim * dtype_bytes

    def kv_bytes(tokens: int) -> float:
        return full_bytes * tokens + window_bytes * min(tokens, window or tokens)

    return Shape(
        model_type=str(c.get("model_type")),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        vocab_size=c["vocab_size"],
        max_positions=_longest_context(c),
        num_experts=c.get("num_experts") or 0,
        head_groups=1,
        weight_bytes=c.get("_weight_bytes") or parameters * dtype_bytes,
        kv_bytes=kv_bytes,
        intermediate_size=c["intermediate_size"],
    )


def _deepseek_v4(c: dict[str, Any]) -> Shape:
    hidden, layers, heads, head_dim = (
        c["hidden_size"],
        c["num_hidden_layers"],
        c["num_attention_heads"],
        c["head_dim"],
    )
    experts, shared, width = c["n_routed_experts"], c["n_shared_experts"], c["moe_intermediate_size"]
    q_rank, o_rank, groups = c["q_lora_rank"], c["o_lora_rank"], c["o_groups"]
    attention = (
        hidden * q_rank
        + q_rank * heads * head_dim
        + hidden * head_dim
        + heads * head_dim * o_rank
        + groups * o_rank * hidden
    )
    expert = 3 * hidden * width
    layer_bytes = experts * expert * _MXFP4_BYTES + (attention + shared * expert) * _FP8_BYTES
    embedding_bytes = 2 * c["vocab_size"] * hidden * 2
    ratios = c["compress_ratios"][:layers]
    drafting_layers = c.get("n_mtp_layers", 0)

    def kv_bytes(tokens: int) -> float:
        """A window of raw rows in every layer; one compressed row for every `ratio` tokens beside it."""
        windows = (layers + drafting_layers) * min(tokens, c["sliding_window"]) * _V4_ROW_BYTES
        rows = sum(tokens / ratio for ratio in ratios if ratio)
        indexed_rows = ratios.count(_V4_INDEXED_RATIO) * tokens / _V4_INDEXED_RATIO
        return windows + rows * _V4_ROW_BYTES + indexed_rows * _V4_INDEX_ROW_BYTES

    return Shape(
        model_type="deepseek_v4",
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=1,
        vocab_size=c["vocab_size"],
        max_positions=_longest_context(c),
        num_experts=experts,
        head_groups=groups,
        weight_bytes=(layers + drafting_layers) * layer_bytes + embedding_bytes,
        kv_bytes=kv_bytes,
    )


def _longest_context(c: dict[str, Any]) -> int | None:
    """Tokens, with what RoPE scaling adds to the trained length; None where config.json says nothing."""
    trained = c.get("max_position_embeddings")
    scaling = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    kind = scaling.get("rope_type", scaling.get("type"))
    if trained is None or kind not in ("linear", "dynamic", "yarn"):
        return trained  # llama3: the writer of config.json has stretched it already
    unscaled = scaling.get("original_max_position_embeddings") or trained
    return max(trained, int(unscaled * scaling.get("factor", 1.0)))
