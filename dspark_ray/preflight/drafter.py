"""What a drafter's config.json says that must fit its target, under the names of the formats in the wild."""

from dataclasses import dataclass
from typing import Any

from dspark_ray.core.config import DrafterConfig
from dspark_ray.models.shapes import Shape, read_shape

# speculators' numbering: 0 is the embedding, i the output of layer i − 1.
_SHIFTED_TAPS = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """None where the checkpoint does not say."""

    hidden_size: int | None
    vocab_size: int | None
    num_target_layers: int | None
    taps: tuple[int, ...] | None  # 0-based layers whose output is read
    block_size: int | None
    mask_token_id: int | None
    has_confidence_head: bool | None
    weight_bytes: float
    kv_bytes_per_token: float  # undivided; 0 where it keeps none of its own


def read_drafter(raw: dict[str, Any], dtype_bytes: int) -> DrafterShape:
    """Of a checkpoint of its own. Raises `ConfigError` for one without a backbone's sizes."""
    backbone = read_shape(raw, dtype_bytes)
    nested = raw.get("transformer_layer_config") or raw
    taps = _taps(raw)
    return DrafterShape(
        hidden_size=raw.get("target_hidden_size") or backbone.hidden_size,
        vocab_size=nested.get("vocab_size"),
        num_target_layers=raw.get("num_target_layers"),
        taps=taps,
        block_size=_first(raw, "block_size", "dspark_block_size"),
        mask_token_id=_first(raw, "mask_token_id", "dspark_noise_token_id", "ptd_token_id"),
        has_confidence_head=raw.get("enable_confidence_head"),
        weight_bytes=backbone.weight_bytes + _head_bytes(raw, backbone, taps, dtype_bytes),
        kv_bytes_per_token=backbone.kv_bytes(1),
    )


def bundled_drafter(raw_target: dict[str, Any], drafter: DrafterConfig) -> DrafterShape | None:
    """Of a target that carries its drafter; its bytes are counted with the target. None without one."""
    if drafter.kind != "dspark" or raw_target.get("dspark_block_size") is None:
        return None
    return DrafterShape(
        hidden_size=raw_target.get("hidden_size"),
        vocab_size=raw_target.get("vocab_size"),
        num_target_layers=raw_target.get("num_hidden_layers"),
        taps=tuple(raw_target.get("dspark_target_layer_ids") or ()) or None,
        block_size=raw_target["dspark_block_size"],
        mask_token_id=raw_target.get("dspark_noise_token_id"),
        has_confidence_head=True,
        weight_bytes=0.0,
        kv_bytes_per_token=0.0,
    )


def _taps(raw: dict[str, Any]) -> tuple[int, ...] | None:
    for name in _SHIFTED_TAPS:
        if raw.get(name):
            return tuple(tap - 1 for tap in raw[name])
    for holder in (raw, raw.get("dflash_config") or {}, raw.get("dspark_config") or {}):
        for name in ("target_layer_ids", "dspark_target_layer_ids"):
            if holder.get(name):
                return tuple(holder[name])
    return None


def _head_bytes(
    raw: dict[str, Any], backbone: Shape, taps: tuple[int, ...] | None, dtype_bytes: int
) -> float:
    """The fusion of the taps and the Markov head."""
    if raw.get("_weight_bytes"):
        return 0.0  # the backbone's are the whole checkpoint's
    fusion = len(taps or ()) * backbone.hidden_size**2
    markov = 2 * (raw.get("markov_rank") or 0) * backbone.vocab_size
    return float((fusion + markov) * dtype_bytes)


def _first(raw: dict[str, Any], *names: str) -> Any:
    holders = (raw, raw.get("dflash_config") or {}, raw.get("dspark_config") or {})
    found = (holder.get(name) for name in names for holder in holders)
    return next((value for value in found if value is not None), None)
