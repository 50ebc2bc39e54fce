"""What a run starts from: the draft vocabulary and the first weights."""

from pathlib import Path

import torch
from torch import Tensor, nn

from dspark_ray.core.errors import ConfigError
from dspark_ray.models.drafters.autoregressive import (
    AutoregressiveConfig,
    AutoregressiveNetwork,
    Eagle3Layer,
    MtpLayer,
)
from dspark_ray.models.drafters.checkpoint import D2T_TENSOR, load_checkpoint
from dspark_ray.models.drafters.families import DrafterConfig, DrafterNetwork, new_network
from dspark_ray.models.drafters.network import DSparkConfig, DSparkNetwork
from dspark_ray.training.cache import TargetCache
from dspark_ray.training.config import ArchitectureConfig
from dspark_ray.training.target import FrozenTarget

VOCABULARY_ROWS = {"markov_head.markov_w2.weight", "lm_head.weight"}  # a row for each draft id


def choose_draft_vocabulary(
    cache: TargetCache, target: FrozenTarget, architecture: ArchitectureConfig
) -> Tensor:
    """The ids that the target says most often over the cached responses, increasing [Vd].

    End-of-text ids are always in, the mask never. Tokens never seen rank by id: byte-pair merges are
    numbered by frequency.
    """
    vocab_size = target.head_weight.shape[0]
    if architecture.draft_vocab_size is None:
        return torch.arange(vocab_size)
    counts = torch.from_numpy(cache.expected_counts(vocab_size))
    counts[list(target.eos_token_ids)] = torch.inf
    if architecture.mask_token_id is not None:
        counts[architecture.mask_token_id] = -1.0
    return counts.argsort(descending=True, stable=True)[: architecture.draft_vocab_size].sort().values


def checkpoint_vocabulary(path: Path) -> Tensor:
    """The draft vocabulary of a checkpoint, increasing target ids [Vd]."""
    config, tensors = load_checkpoint(path)
    return _vocabulary(config, tensors.get(D2T_TENSOR))


def _vocabulary(config: DrafterConfig, deltas: Tensor | None) -> Tensor:
    return torch.arange(config.output_size) + (0 if deltas is None else deltas)


def build_network(
    architecture: ArchitectureConfig, target: FrozenTarget, draft_to_target: Tensor, start_from: Path | None
) -> DrafterNetwork:
    """Another checkpoint's weights where `start_from` names one, else the target's own layers where
    `init_layers` does, else random ones. Raises `ConfigError` where shapes do not fit."""
    network = new_network(_network_config(architecture, target))
    if start_from is not None:
        _copy_checkpoint(network, start_from, draft_to_target)
        return network
    _randomise(network)
    if isinstance(network, AutoregressiveNetwork) and network.lm_head is not None:
        with torch.no_grad():
            network.lm_head.weight.copy_(target.head_weight[draft_to_target])
    if architecture.init_layers:
        _copy_target_layers(network, architecture.init_layers, target)
    return network


def _network_config(architecture: ArchitectureConfig, target: FrozenTarget) -> DrafterConfig:
    shape = {
        **target.drafter_shape(),
        "num_hidden_layers": architecture.num_layers,
        "target_layer_ids": architecture.target_layer_ids,
        "block_size": architecture.block_size,
        "draft_vocab_size": architecture.draft_vocab_size,
        "context_window": architecture.context_window,
        "qk_norm": architecture.qk_norm,
    }
    # The last layer's output predicts the next token all by itself: MTP is the one drafter made for it.
    last = shape["num_target_layers"] - (1 if architecture.kind == "mtp" else 2)
    if max(architecture.target_layer_ids) > last:
        raise ConfigError(f"architecture.target_layer_ids must be below {last + 1}, the last layer")
    if architecture.kind in ("eagle3", "mtp"):
        return AutoregressiveConfig(kind=architecture.kind, **shape)
    assert architecture.mask_token_id is not None
    if architecture.mask_token_id >= shape["vocab_size"]:
        raise ConfigError(f"architecture.mask_token_id must be below the vocabulary's {shape['vocab_size']}")
    return DSparkConfig(
        **shape,
        mask_token_id=architecture.mask_token_id,
        markov_rank=architecture.markov_rank,
        markov_head_type=architecture.markov_head_type,
        enable_confidence_head=architecture.confidence_head,
        confidence_head_with_markov=architecture.markov_rank > 0,
        sample_from_anchor=architecture.sample_from_anchor,
    )


@torch.no_grad()
def _randomise(network: DrafterNetwork) -> None:
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    if isinstance(network, DSparkNetwork) and network.markov_head is not None:
        # The bias starts at zero: W2 learns first.
        nn.init.normal_(network.markov_head.markov_w1.weight, std=0.1)
        nn.init.zeros_(network.markov_head.markov_w2.weight)


@torch.no_grad()
def _copy_target_layers(network: DrafterNetwork, layers: tuple[int, ...], target: FrozenTarget) -> None:
    """Draft layers become target layers, reading the last tap as if it were the layer's input below.

    DSpark and DFlash: fc passes the last tap through and hidden_norm is the first layer's input norm, so that
    its context keys start as the target's own when the last tap is the layer below. EAGLE-3: the same, for
    the half of q, k and v that reads the hidden state; the other half stays random. MTP: the projection
    passes the hidden state through.
    """
    h = network.config.hidden_size
    first_norm = target.layer_state(layers[0])["input_layernorm.weight"]
    for layer, source in zip(network.layers, layers, strict=True):
        state = target.layer_state(source)
        if isinstance(layer, Eagle3Layer):
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(layer.self_attn, name).weight[:, h:] = state.pop(f"self_attn.{name}.weight")
            layer.hidden_norm.weight.copy_(first_norm)
        _copy_fitting(layer, state, source)
        if isinstance(layer, MtpLayer):
            layer.eh_proj.weight[:, h:] = torch.eye(h)
    if network.fc is not None:
        network.fc.weight[:, -h:] = torch.eye(h)
    if isinstance(network, DSparkNetwork):
        network.hidden_norm.weight.copy_(first_norm)
    network.norm.weight.copy_(target.final_norm)


def _copy_fitting(layer: nn.Module, state: dict[str, Tensor], source: int) -> None:
    """Copies a target layer's weights; what only a draft layer has keeps its own."""
    own = ["_norm", "enorm", "hnorm", "eh_proj"]
    if isinstance(layer, Eagle3Layer):
        own += ["q_proj", "k_proj", "v_proj"]
    missing, unexpected = layer.load_state_dict(state, strict=False)
    if unexpected or any(not any(part in name for part in own) for name in missing):
        raise ConfigError(f"target layer {source} does not fit a draft layer: {[*missing, *unexpected]}")


@torch.no_grad()
def _copy_checkpoint(network: DrafterNetwork, path: Path, draft_to_target: Tensor) -> None:
    """The checkpoint may have another draft vocabulary: rows of W2 and of an own LM head follow their target
    ids, new rows are 0."""
    config, tensors = load_checkpoint(path)
    old_ids = _vocabulary(config, tensors.pop(D2T_TENSOR, None))
    for name in tensors.keys() & VOCABULARY_ROWS:
        by_target = torch.zeros(config.vocab_size, tensors[name].shape[1])
        by_target[old_ids] = tensors[name].float()
        tensors[name] = by_target[draft_to_target]
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        raise ConfigError(f"start_from: {path} has another architecture: {error}") from error
