"""Rotary position embedding tables for the scaling types that the Llama / Mistral / Qwen family uses."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dspark_ray.core.errors import ConfigError


class RopeTable:
    """cos and sin of every position, precomputed. Pairs are (i, i + D/2), as in Hugging Face's Llama."""

    def __init__(self, inv_freq: Tensor, attention_scaling: float, max_positions: int) -> None:
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inv_freq.float())
        self.cos = angles.cos() * attention_scaling  # [max_positions, D/2] float32
        self.sin = angles.sin() * attention_scaling  # [max_positions, D/2] float32

    def to(self, device: torch.device) -> "RopeTable":
        """On that device, in place."""
        self.cos, self.sin = self.cos.to(device), self.sin.to(device)
        return self

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each [N, D/2], at `positions` [N]."""
        return self.cos[positions], self.sin[positions]


def rope_parameters(hf_config: dict[str, Any]) -> dict[str, Any]:
    """The RoPE settings of a config.json, wherever its writer put them (`rope_parameters` in
    transformers 5, `rope_theta` and `rope_scaling` before), with `rope_type` and `rope_theta` set."""
    parameters = dict(hf_config.get("rope_scaling") or {})
    parameters.update(hf_config.get("rope_parameters") or {})
    parameters.setdefault("rope_theta", hf_config.get("rope_theta", 10000.0))
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    return parameters


def build_rope(
    parameters: dict[str, Any], head_dim: int, max_position_embeddings: int, max_positions: int
) -> RopeTable:
    """The table for `rope_parameters(...)`, for contexts of at most `max_positions` tokens. The scaling
    formulas are transformers' own.

    `dynamic` is computed for a context of `max_positions` throughout, where transformers follows the length
    of each prompt: angles that changed with every token would not fit the keys that are cached.

    Raises `ConfigError` for a scaling type that cannot be tabulated.
    """
    rope_type = parameters["rope_type"]
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return RopeTable(1.0 / parameters["rope_theta"] ** exponents, 1.0, max_positions)
    if rope_type not in ROPE_INIT_FUNCTIONS or rope_type == "longrope":
        raise ConfigError(
            f"rope_type {rope_type!r} is not supported; known: default, linear, dynamic, llama3, yarn"
        )
    config = SimpleNamespace(
        rope_parameters=parameters,
        rope_theta=parameters["rope_theta"],
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=max_position_embeddings,
        standardize_rope_params=lambda: None,
    )
    init = ROPE_INIT_FUNCTIONS[rope_type]
    inv_freq, attention_scaling = init(config, torch.device("cpu"), seq_len=max_positions)
    return RopeTable(inv_freq, attention_scaling, max_positions)
