"""What one decoder of the Llama / Mistral / Qwen2 / Qwen3 family needs to know from its config.json."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_ray.core.errors import ConfigError
from dspark_ray.core.json_file import read_json_object
from dspark_ray.core.registry import Registry
from dspark_ray.models.rope import rope_parameters


@dataclass(frozen=True)
class DecoderConfig:
    """Shapes and switches of the target decoder."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: dict[str, Any]
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # by layer: how many keys a row sees, its own included; None: all


TARGETS: Registry[Callable[[dict[str, Any]], DecoderConfig]] = Registry("target architecture")
"""model_type → how to read its config.json."""


def read_decoder_config(model_dir: Path) -> DecoderConfig:
    """The config of a model directory; `ConfigError` when absent or of an unknown architecture."""
    raw = read_json_object(model_dir / "config.json", ConfigError)
    return TARGETS.get(str(raw.get("model_type")))(raw)


def _common(raw: dict[str, Any], **switches: Any) -> DecoderConfig:
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(
            f"hidden_act {raw['hidden_act']!r} is not supported; the decoder uses SwiGLU (silu)"
        )
    num_heads = raw["num_attention_heads"]
    settings: dict[str, Any] = {
        "model_type": raw["model_type"],
        "vocab_size": raw["vocab_size"],
        "hidden_size": raw["hidden_size"],
        "intermediate_size": raw["intermediate_size"],
        "num_layers": raw["num_hidden_layers"],
        "num_heads": num_heads,
        "num_kv_heads": raw.get("num_key_value_heads") or num_heads,
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // num_heads,
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "rope": rope_parameters(raw),
        "max_position_embeddings": raw.get("max_position_embeddings", 2048),
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
        "qkv_bias": raw.get("attention_bias", False),
        "o_bias": raw.get("attention_bias", False),
        "mlp_bias": raw.get("mlp_bias", False),
        "qk_norm": False,
        "windows": (None,) * raw["num_hidden_layers"],
    }
    return DecoderConfig(**{**settings, **switches})


@TARGETS.register("llama")
def _llama(raw: dict[str, Any]) -> DecoderConfig:
    return _common(raw)


def _windows(raw: dict[str, Any], first_layer: int) -> tuple[int | None, ...]:
    """As `layer_types` says; where a config has none, every layer from `first_layer` on has the window."""
    count, window = raw["num_hidden_layers"], raw.get("sliding_window")
    kinds = raw.get("layer_types") or [
        "full_attention" if layer < first_layer else "sliding_attention" for layer in range(count)
    ]
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise ConfigError(f"layer_types {sorted(unknown)} are not supported; only full and sliding attention")
    if len(kinds) != count:
        raise ConfigError(f"layer_types names {len(kinds)} layers, and the model has {count}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _qwen_windows(raw: dict[str, Any]) -> tuple[int | None, ...]:
    """The first `max_window_layers` see everything."""
    if not raw.get("use_sliding_window"):
        return (None,) * int(raw["num_hidden_layers"])
    return _windows(raw, raw.get("max_window_layers", 28))


@TARGETS.register("mistral")
def _mistral(raw: dict[str, Any]) -> DecoderConfig:
    return _common(raw, windows=_windows(raw, 0), qkv_bias=False, o_bias=False, mlp_bias=False)


@TARGETS.register("qwen2")
def _qwen2(raw: dict[str, Any]) -> DecoderConfig:
    return _common(raw, windows=_qwen_windows(raw), qkv_bias=True, o_bias=False, mlp_bias=False)


@TARGETS.register("qwen3")
def _qwen3(raw: dict[str, Any]) -> DecoderConfig:
    return _common(raw, windows=_qwen_windows(raw), qk_norm=True, mlp_bias=False)
