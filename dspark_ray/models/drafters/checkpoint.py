"""Drafter checkpoints in DeepSpec's native layout: `config.json` beside `model.safetensors`.

config, tensors = load_checkpoint(path)  # tensor names are `DSparkNetwork`'s, plus `d2t`
save_checkpoint(path, config, network.state_dict(), draft_to_target)

Loading fails closed: a tensor or a key that does not fit is named in a `CheckpointError`. Embedding and
LM head are the target's; a checkpoint may store copies, which are checked for shape and then dropped.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dspark_ray.core.artefact import save_json
from dspark_ray.core.errors import CheckpointError
from dspark_ray.models.drafters.network import DSparkConfig, DSparkNetwork
from dspark_ray.models.weights import SINGLE_FILE, WeightSource, load_safetensors

QK_NORM_TENSOR = "layers.0.self_attn.q_norm.weight"
D2T_TENSOR = "d2t"  # [Vd] int64, a delta: target_id = draft_id + d2t[draft_id]
_MODEL_PREFIX = "model."

# Where public checkpoints put each value; dots go into nested objects. The first that exists counts.
_ALIASES = {
    "block_size": ("block_size", "dspark_block_size", "dspark_config.block_size"),
    "mask_token_id": (
        "mask_token_id",
        "dspark_noise_token_id",
        "ptd_token_id",
        "dflash_config.mask_token_id",
        "dspark_config.mask_token_id",
    ),
    "target_layer_ids": (
        "target_layer_ids",
        "dspark_target_layer_ids",
        "dflash_config.target_layer_ids",
        "dspark_config.target_layer_ids",
    ),
    "markov_rank": ("markov_rank", "dspark_markov_rank", "dspark_config.markov_rank"),
    "rope_theta": ("rope_theta", "rope_parameters.rope_theta", "rope_scaling.rope_theta"),
}
# speculators' numbering: 0 is the embedding, i the output of layer i − 1.
_SHIFTED_LAYER_IDS = "aux_hidden_state_layer_ids"
# Keys that change the network and that it does not carry: only these values are known to change nothing.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sample_from_anchor": (True,),
    "attn_output_gate": (False,),
    "final_logit_softcapping": (None,),
    "use_sliding_window": (False,),
}


def load_checkpoint(path: Path) -> tuple[DSparkConfig, dict[str, Tensor]]:
    """The drafter's config and tensors as stored (bf16 usually), strictly checked.

    The tensors are exactly `DSparkNetwork(config).state_dict()`'s, plus `d2t` with a reduced vocabulary.
    Raises `CheckpointError` naming the key or tensor that is missing, left over or misshapen.
    """
    raw = _read_config(path)
    stored = {name.removeprefix(_MODEL_PREFIX): tensor for name, tensor in load_safetensors(path).items()}
    try:
        config = parse_config(raw, qk_norm=QK_NORM_TENSOR in stored)
        return config, _take_tensors(config, WeightSource(stored))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def save_checkpoint(
    path: Path, config: DSparkConfig, state: dict[str, Tensor], draft_to_target: Tensor | None
) -> None:
    """Write the directory `load_checkpoint` reads. Floating-point tensors become bf16.

    draft_to_target [Vd] int64 target ids of the draft vocabulary, None without one.
    """
    assert (draft_to_target is None) == (config.draft_vocab_size is None), "a draft vocabulary needs its map"
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in state.items()}
    if draft_to_target is not None:
        tensors[D2T_TENSOR] = draft_to_target - torch.arange(len(draft_to_target))
    partial = path / (SINGLE_FILE + ".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(path / SINGLE_FILE)
    save_json(path / "config.json", config_to_json(config))


def parse_config(raw: dict[str, Any], *, qk_norm: bool) -> DSparkConfig:
    """A config.json's object as `DSparkConfig`; q/k norms are told by the tensors, not by the class name."""
    _refuse_unknown_variants(raw)
    hidden_size, num_heads = _integer(raw, "hidden_size"), _integer(raw, "num_attention_heads")
    rank = _integer(raw, "markov_rank", 0)
    rope = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    rope.pop("rope_theta", None)
    vocab_size = _integer(raw, "vocab_size")
    draft_vocab_size = raw.get("draft_vocab_size")
    config = DSparkConfig(
        hidden_size=hidden_size,
        num_hidden_layers=_integer(raw, "num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=_integer(raw, "num_key_value_heads", num_heads),
        head_dim=_integer(raw, "head_dim", hidden_size // num_heads),
        intermediate_size=_integer(raw, "intermediate_size"),
        vocab_size=vocab_size,
        num_target_layers=_integer(raw, "num_target_layers"),
        target_layer_ids=_layer_ids(raw),
        mask_token_id=_integer(raw, "mask_token_id"),
        block_size=_integer(raw, "block_size"),
        draft_vocab_size=None
        if draft_vocab_size in (None, vocab_size)
        else _integer(raw, "draft_vocab_size"),
        markov_rank=rank,
        markov_head_type=raw.get("markov_head_type", "vanilla"),
        enable_confidence_head=bool(raw.get("enable_confidence_head", False)),
        confidence_head_with_markov=bool(raw.get("confidence_head_with_markov", rank > 0)),
        qk_norm=qk_norm,
        rms_norm_eps=float(_required(raw, "rms_norm_eps")),
        rope_theta=float(_required(raw, "rope_theta")),
        rope_scaling=rope,
    )
    _check_config(config)
    return config


def config_to_json(config: DSparkConfig) -> dict[str, Any]:
    """DeepSpec's config.json keys, and `draft_vocab_size`."""
    family = "qwen3" if config.qk_norm else "llama"
    return {
        "architectures": [f"{family.capitalize()}DSparkModel"],
        "model_type": family,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling or None,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "num_target_layers": config.num_target_layers,
        "target_layer_ids": list(config.target_layer_ids),
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.enable_confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
    }


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} does not hold a JSON object")
    return raw


def _take_tensors(config: DSparkConfig, source: WeightSource) -> dict[str, Tensor]:
    with torch.device("meta"):
        expected = DSparkNetwork(config).state_dict()
    tensors = {name: source.take(name, tensor.shape) for name, tensor in expected.items()}
    if config.draft_vocab_size is not None:
        tensors[D2T_TENSOR] = source.take(D2T_TENSOR, (config.draft_vocab_size,)).long()
        ids = tensors[D2T_TENSOR] + torch.arange(config.draft_vocab_size)
        if not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size or len(ids.unique()) < len(ids):
            raise CheckpointError(
                f"tensor '{D2T_TENSOR}' is not a map from draft ids to distinct target ids below "
                f"{config.vocab_size}; it must hold target_id − draft_id"
            )
    source.take_optional("embed_tokens.weight", (config.vocab_size, config.hidden_size))
    source.take_optional("lm_head.weight", (config.output_size, config.hidden_size))
    source.finish(ignorable=["t2d"])  # t2d says what d2t says
    return tensors


def _required(raw: dict[str, Any], name: str) -> Any:
    """The value of a key under any of its aliases."""
    for alias in _ALIASES.get(name, (name,)):
        value: Any = raw
        for key in alias.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            return value
    raise CheckpointError(f"config.json has no {' or '.join(_ALIASES.get(name, (name,)))}")


def _integer(raw: dict[str, Any], name: str, default: int | None = None) -> int:
    try:
        value = _required(raw, name)
    except CheckpointError:
        if default is None:
            raise
        return default
    if type(value) is not int:
        raise CheckpointError(f"config.json: {name} must be an integer, not {value!r}")
    return value


def _layer_ids(raw: dict[str, Any]) -> tuple[int, ...]:
    shifted = raw.get(_SHIFTED_LAYER_IDS)
    ids = [i - 1 for i in shifted] if isinstance(shifted, list) else _required(raw, "target_layer_ids")
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise CheckpointError(f"config.json: target_layer_ids must be a list of integers, not {ids!r}")
    return tuple(ids)


def _refuse_unknown_variants(raw: dict[str, Any]) -> None:
    for key, neutral in _NEUTRAL_VALUES.items():
        if key in raw and raw[key] not in neutral:
            raise CheckpointError(f"config.json: {key} = {raw[key]!r} is not supported")
    head_type = raw.get("markov_head_type", "vanilla")
    if head_type != "vanilla":
        raise CheckpointError(f"config.json: markov_head_type {head_type!r} is not supported, only 'vanilla'")


def _check_config(config: DSparkConfig) -> None:
    """What a shape check of the tensors would not find."""
    if config.mask_token_id >= config.vocab_size:
        raise CheckpointError(
            f"mask_token_id {config.mask_token_id} is outside the vocabulary {config.vocab_size}"
        )
    if config.enable_confidence_head and config.confidence_head_with_markov and not config.markov_rank:
        raise CheckpointError("confidence_head_with_markov needs a markov_rank above 0")
    ids = config.target_layer_ids
    if not ids or any(a >= b for a, b in pairwise(ids)):
        raise CheckpointError(f"target_layer_ids {list(ids)} must increase")
    # −1 is the embedding. The last layer's output is only known once its token is.
    if ids[0] < -1 or ids[-1] >= config.num_target_layers - 1:
        raise CheckpointError(f"target_layer_ids {list(ids)} must lie in -1..{config.num_target_layers - 2}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise CheckpointError("num_attention_heads must be a multiple of num_key_value_heads")
