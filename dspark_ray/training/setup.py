"""What a run starts from: the draft vocabulary and the first weights."""

from pathlib import Path

import torch
from torch import Tensor, nn

from dspark_ray.core.errors import ConfigError
from dspark_ray.models.drafters.checkpoint import D2T_TENSOR, load_checkpoint
from dspark_ray.models.drafters.network import DSparkConfig, DSparkNetwork
from dspark_ray.training.cache import TargetCache
from dspark_ray.training.config import ArchitectureConfig
from dspark_ray.training.target import FrozenTarget

MARKOV_W2 = "markov_head.markov_w2.weight"


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
    counts[architecture.mask_token_id] = -1.0
    return counts.argsort(descending=True, stable=True)[: architecture.draft_vocab_size].sort().values


def checkpoint_vocabulary(path: Path) -> Tensor:
    """The draft vocabulary of a checkpoint, increasing target ids [Vd]."""
    config, tensors = load_checkpoint(path)
    return _vocabulary(config, tensors.get(D2T_TENSOR))


def _vocabulary(config: DSparkConfig, deltas: Tensor | None) -> Tensor:
    return torch.arange(config.output_size) + (0 if deltas is None else deltas)


def build_network(
    architecture: ArchitectureConfig, target: FrozenTarget, draft_to_target: Tensor, start_from: Path | None
) -> DSparkNetwork:
    """Another checkpoint's weights where `start_from` names one, else the target's own layers where
    `init_layers` does, else random ones. Raises `ConfigError` where shapes do not fit."""
    config = target.drafter_config(
        num_hidden_layers=architecture.num_layers,
        target_layer_ids=architecture.target_layer_ids,
        mask_token_id=architecture.mask_token_id,
        block_size=architecture.block_size,
        draft_vocab_size=architecture.draft_vocab_size,
        markov_rank=architecture.markov_rank,
        confidence_head_with_markov=architecture.markov_rank > 0,
        qk_norm=architecture.qk_norm,
    )
    if max(architecture.target_layer_ids) >= config.num_target_layers - 1:
        raise ConfigError(
            f"architecture.target_layer_ids must be below {config.num_target_layers - 1}, the last layer"
        )
    if architecture.mask_token_id >= config.vocab_size:
        raise ConfigError(f"architecture.mask_token_id must be below the vocabulary's {config.vocab_size}")
    network = DSparkNetwork(config)
    if start_from is not None:
        _copy_checkpoint(network, start_from, draft_to_target)
        return network
    _randomise(network)
    if architecture.init_layers:
        _copy_target_layers(network, architecture.init_layers, target)
    return network


@torch.no_grad()
def _randomise(network: DSparkNetwork) -> None:
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    if network.markov_head is not None:  # the bias starts at zero: W2 learns first
        nn.init.normal_(network.markov_head.markov_w1.weight, std=0.1)
        nn.init.zeros_(network.markov_head.markov_w2.weight)


@torch.no_grad()
def _copy_target_layers(network: DSparkNetwork, layers: tuple[int, ...], target: FrozenTarget) -> None:
    """Draft layers become target layers. fc passes the last tap through and hidden_norm is the first layer's
    input norm, so that its context keys start as the target's own when the last tap is the layer below."""
    for layer, source in zip(network.layers, layers, strict=True):
        missing, unexpected = layer.load_state_dict(target.layer_state(source), strict=False)
        if unexpected or any("_norm" not in name for name in missing):
            raise ConfigError(f"target layer {source} does not fit a draft layer: {[*missing, *unexpected]}")
    h = network.config.hidden_size
    network.fc.weight[:, -h:] = torch.eye(h)
    network.hidden_norm.weight.copy_(target.layer_state(layers[0])["input_layernorm.weight"])
    network.norm.weight.copy_(target.final_norm)


@torch.no_grad()
def _copy_checkpoint(network: DSparkNetwork, path: Path, draft_to_target: Tensor) -> None:
    """The checkpoint may have another draft vocabulary: W2's rows follow their target ids, new rows are 0."""
    config, tensors = load_checkpoint(path)
    old_ids = _vocabulary(config, tensors.pop(D2T_TENSOR, None))
    if MARKOV_W2 in tensors:
        by_target = torch.zeros(config.vocab_size, config.markov_rank)
        by_target[old_ids] = tensors[MARKOV_W2].float()
        tensors[MARKOV_W2] = by_target[draft_to_target]
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        raise ConfigError(f"start_from: {path} has another architecture: {error}") from error
