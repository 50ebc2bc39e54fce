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
from dspark_ray.core.errors import CheckpointError, ConfigError
from dspark_ray.core.json_file import read_json_object
from dspark_ray.models.drafters.autoregressive import AutoregressiveConfig
from dspark_ray.models.drafters.config_json import StoredTensors, Verifier, config_to_json, parse_config
from dspark_ray.models.drafters.families import DrafterConfig, new_network
from dspark_ray.models.drafters.network import DSparkConfig
from dspark_ray.models.weights import SINGLE_FILE, WeightSource, load_safetensors

D2T_TENSOR = "d2t"  # [Vd] int64, a delta: target_id = draft_id + d2t[draft_id]
T2D_TENSOR = "t2d"  # [V] bool, what d2t says: which target ids have a draft id
_LM_HEAD = "lm_head.weight"
# DFlash checkpoints may bring an embedding of their own for the mask, as a file beside the weights. A tensor
# of nearly the same name, `mask_embedding`, is a placeholder that no reader uses.
_MASK_EMBEDDING_FILE = "mask_embedding.pt"
_UNUSED = "mask_embedding"
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
    if (path / _MASK_EMBEDDING_FILE).exists():
        raise CheckpointError(
            f"{path}: {_MASK_EMBEDDING_FILE}: a mask with an embedding of its own is not supported"
        )
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
    verifier: Verifier | None = None,
) -> None:
    """Write the directory `load_checkpoint` reads. Floating-point tensors become bf16.

    draft_to_target [Vd] int64 target ids of the draft vocabulary, None without one. With a `verifier` it is
    speculators' layout; raises `ConfigError` for a drafter that it has no place for.
    """
    assert (draft_to_target is None) == (config.draft_vocab_size is None), "a draft vocabulary needs its map"
    if verifier is not None:
        state = state | _for_speculators(config, state, draft_to_target, verifier)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in state.items()}
    if draft_to_target is not None:
        tensors[D2T_TENSOR] = draft_to_target - torch.arange(len(draft_to_target))
        if verifier is not None:
            known = torch.zeros(config.vocab_size, dtype=torch.bool)
            known[draft_to_target] = True
            tensors[T2D_TENSOR] = known
    partial = path / (SINGLE_FILE + ".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(path / SINGLE_FILE)
    save_json(path / "config.json", config_to_json(config, verifier))


def _for_speculators(
    config: DrafterConfig, state: dict[str, Tensor], draft_to_target: Tensor | None, verifier: Verifier
) -> dict[str, Tensor]:
    """The LM head rows of a draft vocabulary, where the drafter has no head of its own: readers of this
    layout cannot pick them from the target's."""
    if isinstance(config, DSparkConfig) and not config.qk_norm:
        raise ConfigError(
            f"speculators' layers of kind {config.kind!r} norm queries and keys, and would do so with these "
            "weights: train with architecture.qk_norm: true, or save the native layout"
        )
    if draft_to_target is None or _LM_HEAD in state:
        return {}
    return {_LM_HEAD: verifier.head_weight[draft_to_target]}


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
    source.finish(ignorable=[T2D_TENSOR, _UNUSED])
    return tensors
