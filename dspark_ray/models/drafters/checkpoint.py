"""Drafter checkpoints: `config.json` beside `model.safetensors`, in the layouts that the field uses.

config, tensors = load_checkpoint(path)  # tensor names are the network's, plus `d2t`
save_checkpoint(path, config, network.state_dict(), draft_to_target)

What a checkpoint is (DSpark, DFlash, EAGLE-3, MTP) is told by its tensors, not by its class name. Loading
fails closed: a tensor or a key that does not fit is named in a `CheckpointError`. Embedding and LM head are
the target's (EAGLE-3 has its own LM head); stored copies are checked for shape and then dropped.
`config_json.py` knows the keys.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dspark_ray.core.artefact import save_json
from dspark_ray.core.errors import CheckpointError
from dspark_ray.core.json_file import read_json_object
from dspark_ray.models.drafters.autoregressive import AutoregressiveConfig
from dspark_ray.models.drafters.config_json import Layout, StoredTensors, config_to_json, parse_config
from dspark_ray.models.drafters.families import DrafterConfig, new_network
from dspark_ray.models.weights import SINGLE_FILE, WeightSource, load_safetensors

D2T_TENSOR = "d2t"  # [Vd] int64, a delta: target_id = draft_id + d2t[draft_id]
T2D_TENSOR = "t2d"  # [V] bool, what d2t says: which target ids have a draft id
_LM_HEAD = "lm_head.weight"
_RENAMED_PREFIXES = (("model.", ""), ("midlayer.", "layers.0."))


def load_checkpoint(
    path: Path, num_target_layers: int | None = None
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """The drafter's config and tensors as stored (bf16 usually), strictly checked.

    The tensors are exactly the network's `state_dict()`, plus `d2t` with a reduced vocabulary.
    `num_target_layers` stands in where config.json does not say it. Raises `CheckpointError` naming the
    key or tensor that is missing, left over or misshapen.
    """
    raw = read_json_object(path / "config.json", CheckpointError)
    stored = {_network_name(name): tensor for name, tensor in load_safetensors(path).items()}
    if num_target_layers is not None:
        raw.setdefault("num_target_layers", num_target_layers)
    try:
        config = parse_config(raw, StoredTensors(stored))
        return config, _take_tensors(config, WeightSource(stored))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def save_checkpoint(
    path: Path,
    config: DrafterConfig,
    state: dict[str, Tensor],
    draft_to_target: Tensor | None,
    layout: Layout = "native",
) -> None:
    """Write the directory `load_checkpoint` reads. Floating-point tensors become bf16.

    draft_to_target [Vd] int64 target ids of the draft vocabulary, None without one.
    """
    assert (draft_to_target is None) == (config.draft_vocab_size is None), "a draft vocabulary needs its map"
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in state.items()}
    if draft_to_target is not None:
        tensors[D2T_TENSOR] = draft_to_target - torch.arange(len(draft_to_target))
        if layout == "speculators":
            known = torch.zeros(config.vocab_size, dtype=torch.bool)
            known[draft_to_target] = True
            tensors[T2D_TENSOR] = known
    partial = path / (SINGLE_FILE + ".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(path / SINGLE_FILE)
    save_json(path / "config.json", config_to_json(config, layout))


def _network_name(stored: str) -> str:
    for prefix, replacement in _RENAMED_PREFIXES:
        if stored.startswith(prefix):
            stored = replacement + stored.removeprefix(prefix)
    return stored


def _take_tensors(config: DrafterConfig, source: WeightSource) -> dict[str, Tensor]:
    with torch.device("meta"):
        expected = new_network(config).state_dict()
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
    if not (isinstance(config, AutoregressiveConfig) and config.has_own_head):
        source.take_optional(_LM_HEAD, (config.output_size, config.hidden_size))
    source.finish(ignorable=[T2D_TENSOR])
    return tensors
