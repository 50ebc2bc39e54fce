"""One tiny random drafter of every family and head: what the contract tests of all drafters run over."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dspark_ray.models.drafters.autoregressive import AutoregressiveConfig
from dspark_ray.models.drafters.checkpoint import save_checkpoint
from dspark_ray.models.drafters.config_json import Verifier
from dspark_ray.models.drafters.families import DrafterConfig, DrafterNetwork, new_network
from dspark_ray.models.drafters.network import DSparkConfig
from tests.tiny_engine import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS


@dataclass(frozen=True)
class Family:
    """What makes a drafter of this kind out of the shared sizes."""

    kind: str
    fields: dict[str, Any]


_NO_HEADS = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}

FAMILIES = {
    "dspark": Family("dspark", {"markov_rank": 8}),
    "gated": Family("dspark", {"markov_rank": 8, "markov_head_type": "gated"}),
    "rnn": Family("dspark", {"markov_rank": 8, "markov_head_type": "rnn"}),
    "window": Family("dspark", {"markov_rank": 8, "context_window": 16}),
    "dflash": Family("dflash", {**_NO_HEADS, "sample_from_anchor": False}),
    "dflash-anchor": Family("dflash", _NO_HEADS),
    "eagle3": Family("eagle3", {}),
    "eagle3-normed": Family("eagle3", {"norm_before_residual": True, "context_window": 16}),
    "mtp": Family("mtp", {"block_size": 1, "target_layer_ids": (LAYERS - 1,)}),
}


def family_config(name: str, vocab_size: int, draft_vocab_size: int | None = None) -> DrafterConfig:
    """The configuration of a tiny drafter for `tiny_decoder(vocab_size)`."""
    family = FAMILIES[name]
    one_layer = family.kind in ("eagle3", "mtp")
    fields: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1 if one_layer else 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INNER,
        "vocab_size": vocab_size,
        "num_target_layers": LAYERS,
        "target_layer_ids": (0, 1),
        "block_size": 4,
        "draft_vocab_size": draft_vocab_size,
        **family.fields,
    }
    if one_layer:
        return AutoregressiveConfig(kind=family.kind, **fields)
    return DSparkConfig(mask_token_id=0, **fields)


def family_network(config: DrafterConfig, seed: int = 1) -> DrafterNetwork:
    """Random weights, wide enough that every part of the network shows in its logits."""
    generator = torch.Generator().manual_seed(seed)
    network = new_network(config).requires_grad_(False)
    for name, parameter in network.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = 0.6 if "head" in name else parameter.shape[-1] ** -0.5
        parameter.copy_(1.0 + 0.2 * noise if "norm" in name else scale * noise)
    return network


def verifier(vocab_size: int, hidden_size: int = HIDDEN) -> Verifier:
    """A target as speculators' layout names it."""
    return Verifier("the-target", torch.ones(vocab_size, hidden_size), 512)


def family_dir(path: Path, name: str, vocab_size: int, draft_vocab: tuple[int, ...] | None = None) -> Path:
    """A tiny drafter's checkpoint."""
    config = family_config(name, vocab_size, None if draft_vocab is None else len(draft_vocab))
    mapping = None if draft_vocab is None else torch.tensor(sorted(draft_vocab))
    save_checkpoint(path, config, family_network(config).state_dict(), mapping)
    return path
