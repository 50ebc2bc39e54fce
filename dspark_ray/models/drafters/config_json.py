"""config.json of a drafter, read and written: DeepSpec's keys, speculators', DFlash's and EAGLE-3's.

Layouts differ in four things that no shape check would find:
- taps: DeepSpec's `target_layer_ids` i is the output of layer i; `aux_hidden_state_layer_ids` counts from the
  embedding, i is the output of layer i − 1;
- `sample_from_anchor`: whether the anchor's slot predicts. With True `block_size` is γ, with False γ + 1;
- the backbone's keys: at the top, or under `transformer_layer_config` (speculators);
- `rope_theta`: at the top, or under `rope_parameters`. It is never guessed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from torch import Tensor

from dspark_ray.core.errors import CheckpointError
from dspark_ray.models.drafters.autoregressive import AutoregressiveConfig
from dspark_ray.models.drafters.families import DrafterConfig
from dspark_ray.models.drafters.network import DSparkConfig

_DEFAULT_HORIZON = 7  # an autoregressive drafter's γ where its config does not say what it was trained for

# Where public checkpoints put each value; dots go into nested objects. The first that exists counts.
_ALIASES = {
    "block_size": ("block_size", "dspark_block_size", "dspark_config.block_size"),
    "horizon": ("block_size", "ttt_length", "length"),
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
# Counted from the embedding: i is the output of layer i − 1.
_SHIFTED_LAYER_IDS = (
    "aux_hidden_state_layer_ids",
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config.eagle_aux_hidden_state_layer_ids",
)
# Keys that change the network and that it does not carry: only these values are known to change nothing.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attn_output_gate": (False, None),
    "final_logit_softcapping": (None,),
    "use_sliding_window": (False, None),
    "sliding_window_non_causal": (True, False, None),  # of sliding windows, which are refused
    "norm_before_fc": (False, None),
    "eagle_config.norm_before_fc": (False, None),
    "fc_norm": (False, None),
    "norm_output": (False, None),
    "logit_scale": (1, None),
    "is_neox_style": (True, None),
    "use_aux_hidden_state": (True, None),
    "eagle_config.use_aux_hidden_state": (True, None),
    "dflash_config.use_aux_hidden_state": (True, None),
    "dflash_config.causal": (False, None),
    "dflash_config.use_swa": (False, None),
    "dflash_config.attention_sink_bias": (False, None),
    "dflash_config.attention_value_scale": (None,),
    "add_swa_attention_sink_bias": (False, None),
}
# The same for DSpark and DFlash alone: EAGLE-3's rows are causal by nature.
_NEUTRAL_BLOCK_VALUES: dict[str, tuple[Any, ...]] = {"is_causal": (False, None)}


class StoredTensors:
    """What a checkpoint's tensors say that its config may not: which drafter it is and what it carries."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    @property
    def kind(self) -> Literal["block", "eagle3", "mtp"]:
        """`block` is DSpark or DFlash. `CheckpointError` naming a tensor for anything else."""
        names = self._tensors
        if foreign := next((name for name in sorted(names) if name.startswith("mtp.")), None):
            raise CheckpointError(
                f"tensor {foreign!r}: a drafter inside a target's checkpoint is not supported"
            )
        if "layers.0.eh_proj.weight" in names:
            return "mtp"
        if "layers.0.hidden_norm.weight" in names:
            return "eagle3"
        if "hidden_norm.weight" in names or "fc.weight" in names:
            return "block"
        shown = ", ".join(sorted(names)[:4]) or "none"
        raise CheckpointError(
            f"no tensor tells a drafter: neither 'fc.weight' and 'hidden_norm.weight' (DSpark, DFlash) nor "
            f"'layers.0.hidden_norm.weight' (EAGLE-3) nor 'layers.0.eh_proj.weight' (MTP); it has {shown}"
        )

    @property
    def qk_norm(self) -> bool:
        return "layers.0.self_attn.q_norm.weight" in self._tensors

    @property
    def has_confidence_head(self) -> bool:
        return "confidence_head.proj.weight" in self._tensors

    @property
    def markov_head_type(self) -> str | None:
        """None without a sequential head."""
        if "markov_head.markov_w1.weight" not in self._tensors:
            return None
        for head_type, name in (("gated", "gate_proj"), ("rnn", "joint_proj")):
            if f"markov_head.{name}.weight" in self._tensors:
                return head_type
        return "vanilla"

    def width(self, name: str) -> int | None:
        """Columns of a matrix; None where it is absent."""
        tensor = self._tensors.get(name)
        return None if tensor is None else int(tensor.shape[-1])


def parse_config(raw: dict[str, Any], stored: StoredTensors) -> DrafterConfig:
    """A config.json's object as the drafter's configuration; the tensors say which drafter it is."""
    flat = {**raw.get("transformer_layer_config", {}), **raw}
    kind = stored.kind
    _refuse_unknown_variants(flat, kind)
    config = _block_config(flat, stored) if kind == "block" else _autoregressive_config(flat, stored, kind)
    _check_config(config, stored)
    return config


@dataclass(frozen=True, slots=True)
class Verifier:
    """What speculators' layout says about the target, in words and in tensors."""

    name: str  # hub id or directory
    head_weight: Tensor  # [V, H] the LM head
    max_position_embeddings: int


def config_to_json(config: DrafterConfig, verifier: Verifier | None = None) -> dict[str, Any]:
    """The keys of the drafter's own family; speculators' for a `verifier`."""
    own = _block_keys(config) if isinstance(config, DSparkConfig) else _autoregressive_keys(config)
    if config.context_window is not None:
        own["context_window"] = config.context_window
    if verifier is None:
        own |= _tap_keys(config)
        return {**_backbone_keys(config), **own}
    if isinstance(config, DSparkConfig):
        own["sample_from_anchor"] = config.sample_from_anchor  # never left to a reader's default
    backbone = _backbone_keys(config) | {"max_position_embeddings": verifier.max_position_embeddings}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": config.block_size,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        **own,
        "architectures": [f"{_SPECULATORS_CLASSES[config.kind]}Speculator"],
        "speculators_model_type": config.kind,
        "speculators_config": {  # by which readers know the layout
            "algorithm": config.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier.name, "architectures": []},
        },
        "transformer_layer_config": backbone,
        "target_hidden_size": config.hidden_size,
        "num_target_layers": config.num_target_layers,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        _SHIFTED_LAYER_IDS[config.kind == "eagle3"]: [i + 1 for i in config.target_layer_ids],
    }


_SPECULATORS_CLASSES = {"dspark": "DSpark", "dflash": "DFlash", "eagle3": "Eagle3", "mtp": "MTP"}


def _block_config(raw: dict[str, Any], stored: StoredTensors) -> DSparkConfig:
    head_type = stored.markov_head_type
    rank = _integer(raw, "markov_rank", 0)
    if head_type is None and rank:
        raise CheckpointError(f"markov_rank is {rank}, but tensor 'markov_head.markov_w1.weight' is missing")
    if head_type is not None and (named := raw.get("markov_head_type", head_type)) != head_type:
        raise CheckpointError(f"markov_head_type is {named!r}, the tensors are those of {head_type!r}")
    has_confidence = bool(raw.get("enable_confidence_head", stored.has_confidence_head))
    from_anchor = _samples_from_anchor(raw, head_type)
    return DSparkConfig(
        **_shape(raw, stored),
        block_size=_integer(raw, "block_size") - (0 if from_anchor else 1),
        target_layer_ids=_layer_ids(raw),
        mask_token_id=_integer(raw, "mask_token_id"),
        markov_rank=rank,
        markov_head_type=head_type or "vanilla",
        enable_confidence_head=has_confidence,
        confidence_head_with_markov=bool(raw.get("confidence_head_with_markov", rank > 0)),
        sample_from_anchor=from_anchor,
    )


def _samples_from_anchor(raw: dict[str, Any], head_type: str | None) -> bool:
    """Where no key says it, the layout decides: the anchor predicts in DeepSpec's. It does not in DFlash's
    own, which has no sequential head, nor in speculators' from before it wrote the key."""
    for key in ("sample_from_anchor", "dflash_config.sample_from_anchor"):
        if (value := _look_up(raw, key)) is not None:
            return bool(value)
    if (bonus := _look_up(raw, "dspark_bonus_anchor")) is not None:
        return not bonus
    return "speculators_model_type" not in raw and ("dflash_config" not in raw or head_type is not None)


def _autoregressive_config(
    raw: dict[str, Any], stored: StoredTensors, kind: Literal["eagle3", "mtp"]
) -> AutoregressiveConfig:
    layers = _integer(raw, "num_target_layers")
    if kind == "eagle3" and "speculators_model_type" in raw and "norm_before_residual" not in raw:
        raise CheckpointError(
            "config.json has no norm_before_residual: of speculators' readers some take true then, some false"
        )
    if not _has_layer_ids(raw) and kind == "eagle3":
        # EAGLE-3's own choice: the inputs of layers 2, n/2 and n − 3.
        ids: tuple[int, ...] = (1, layers // 2 - 1, layers - 4)
    else:
        ids = _layer_ids(raw)
    return AutoregressiveConfig(
        **_shape(raw, stored),
        kind=kind,
        block_size=_integer(raw, "horizon", _DEFAULT_HORIZON),
        target_layer_ids=ids,
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
    )


def _shape(raw: dict[str, Any], stored: StoredTensors) -> dict[str, Any]:
    """`DrafterShape`'s fields, but for γ and the taps."""
    hidden_size, num_heads = _integer(raw, "hidden_size"), _integer(raw, "num_attention_heads")
    rope = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    rope.pop("rope_theta", None)
    vocab_size = _integer(raw, "vocab_size")
    draft_vocab_size = raw.get("draft_vocab_size")
    reduced = draft_vocab_size not in (None, vocab_size)
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": _integer(raw, "num_hidden_layers"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _integer(raw, "num_key_value_heads", num_heads),
        "head_dim": _integer(raw, "head_dim", hidden_size // num_heads),
        "intermediate_size": _integer(raw, "intermediate_size"),
        "vocab_size": vocab_size,
        "num_target_layers": _integer(raw, "num_target_layers"),
        "draft_vocab_size": _integer(raw, "draft_vocab_size") if reduced else None,
        "context_window": None if raw.get("context_window") is None else _integer(raw, "context_window"),
        "qk_norm": stored.qk_norm,
        "rms_norm_eps": float(_required(raw, "rms_norm_eps")),
        "rope_theta": float(_required(raw, "rope_theta")),
        "rope_scaling": {} if rope.get("rope_type") == "default" else rope,
    }


def _backbone_keys(config: DrafterConfig) -> dict[str, Any]:
    return {
        "model_type": "qwen3" if config.qk_norm else "llama",
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
    }


def _tap_keys(config: DrafterConfig) -> dict[str, Any]:
    return {
        "draft_vocab_size": config.draft_vocab_size,
        "num_target_layers": config.num_target_layers,
        "target_layer_ids": list(config.target_layer_ids),
    }


def _block_keys(config: DSparkConfig) -> dict[str, Any]:
    family = "Qwen3" if config.qk_norm else "Llama"
    keys: dict[str, Any] = {
        "architectures": [f"{family}DSparkModel"],
        "block_size": config.num_slots(config.block_size),
        "mask_token_id": config.mask_token_id,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.enable_confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
    }
    if not config.sample_from_anchor:
        keys["sample_from_anchor"] = False
    if config.kind == "dflash" and not config.sample_from_anchor:
        keys["architectures"] = ["DFlashDraftModel"]
        keys["dflash_config"] = {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        }
    return keys


def _autoregressive_keys(config: AutoregressiveConfig) -> dict[str, Any]:
    family = "Qwen3" if config.qk_norm else "Llama"
    return {
        "architectures": [f"{family}{'Eagle3' if config.kind == 'eagle3' else 'MTP'}Model"],
        "block_size": config.block_size,
        "norm_before_residual": config.norm_before_residual,
    }


def _look_up(raw: dict[str, Any], path: str) -> Any:
    value: Any = raw
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _required(raw: dict[str, Any], name: str) -> Any:
    """The value of a key under any of its aliases."""
    aliases = _ALIASES.get(name, (name,))
    for alias in aliases:
        value = _look_up(raw, alias)
        if value is not None:
            return value
    raise CheckpointError(f"config.json has no {' or '.join(aliases)}")


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


def _has_layer_ids(raw: dict[str, Any]) -> bool:
    names = (*_SHIFTED_LAYER_IDS, *_ALIASES["target_layer_ids"])
    return any(_look_up(raw, name) is not None for name in names)


def _layer_ids(raw: dict[str, Any]) -> tuple[int, ...]:
    shifted = next((ids for name in _SHIFTED_LAYER_IDS if (ids := _look_up(raw, name)) is not None), None)
    ids = shifted if shifted is not None else _required(raw, "target_layer_ids")
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise CheckpointError(f"config.json: target_layer_ids must be a list of integers, not {ids!r}")
    return tuple(i - 1 for i in ids) if shifted is not None else tuple(ids)


def _refuse_unknown_variants(raw: dict[str, Any], kind: str) -> None:
    for key, neutral in (_NEUTRAL_VALUES | (_NEUTRAL_BLOCK_VALUES if kind == "block" else {})).items():
        value = _look_up(raw, key)
        if value is not None and value not in neutral:
            raise CheckpointError(f"config.json: {key} = {value!r} is not supported")
    if any(layer_type != "full_attention" for layer_type in raw.get("layer_types") or ()):
        raise CheckpointError(f"config.json: layer_types {raw['layer_types']} are not all full_attention")


def _check_config(config: DrafterConfig, stored: StoredTensors) -> None:
    """What a shape check of the tensors would not find, or not explain."""
    ids = config.target_layer_ids
    if isinstance(config, DSparkConfig):
        if config.mask_token_id >= config.vocab_size:
            raise CheckpointError(
                f"mask_token_id {config.mask_token_id} is outside the vocabulary {config.vocab_size}"
            )
        if config.enable_confidence_head and config.confidence_head_with_markov and not config.markov_rank:
            raise CheckpointError("confidence_head_with_markov needs a markov_rank above 0")
        if config.block_size < 1:
            raise CheckpointError("block_size leaves no token to draft")
    if not ids or any(a >= b for a, b in pairwise(ids)):
        raise CheckpointError(f"target_layer_ids {list(ids)} must increase")
    # −1 is the embedding. The last layer's output is what MTP reads; elsewhere it is a sign of another count.
    last = config.num_target_layers - (1 if config.kind == "mtp" else 2)
    if ids[0] < -1 or ids[-1] > last:
        raise CheckpointError(f"target_layer_ids {list(ids)} must lie in -1..{last}")
    if stored.width("fc.weight") == (len(ids) + 1) * config.hidden_size:
        raise CheckpointError(
            f"tensor 'fc.weight' reads {len(ids) + 1} taps, target_layer_ids names {len(ids)}: a drafter "
            "that also taps the last layer without saying so is not supported"
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise CheckpointError("num_attention_heads must be a multiple of num_key_value_heads")
