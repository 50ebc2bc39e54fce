"""Every registered target against transformers: logits and hidden states on tiny random checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dspark_kernels.attention import PagedBatch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dspark_ray.core.errors import CheckpointError
from dspark_ray.models.targets import TARGETS, Decoder, load_target
from tests.reference import dense_logits
from tests.tiny import tiny_model_dir

ROPE_SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
}


def forward_in_chunks(target: Decoder, tokens: torch.Tensor, chunks: list[int]) -> tuple[torch.Tensor, ...]:
    """(logits, taps) of one sequence fed in chunks through blocks of 4 slots in shuffled order."""
    total = len(tokens)
    num_blocks = -(-total // 4)
    table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    kv = target.new_kv(num_blocks * 4)
    logits, taps, start = [], [], 0
    for size in chunks:
        positions = torch.arange(start, start + size)
        batch = PagedBatch(
            query_start=torch.tensor([0, size], dtype=torch.int32),
            kv_len=torch.tensor([start + size], dtype=torch.int32),
            block_tables=table.unsqueeze(0),
            block_size=4,
            max_query=size,
            max_kv=start + size,
        )
        slots = table[positions // 4].long() * 4 + positions % 4
        with torch.inference_mode():
            out = target.forward(tokens[start : start + size], positions, kv, slots, batch, (0, 1))
            logits.append(target.logits(out.hidden))
            taps.append(out.taps)
        start += size
    return torch.cat(logits), torch.cat(taps)


def check_against_transformers(model_dir: Path, vocab_size: int = 128, max_positions: int = 64) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokens = torch.randint(0, vocab_size, (37,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(tokens.unsqueeze(0), output_hidden_states=True)
    target = load_target(model_dir, torch.float32, max_positions)
    logits, taps = forward_in_chunks(target, tokens, [20, 1, 7, 9])
    torch.testing.assert_close(logits, expected.logits[0], atol=2e-4, rtol=1e-4)
    hidden = torch.cat([expected.hidden_states[1][0], expected.hidden_states[2][0]], dim=1)
    torch.testing.assert_close(taps, hidden, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", TARGETS.names())
def test_agrees_with_transformers(tmp_path: Path, architecture: str) -> None:
    check_against_transformers(tiny_model_dir(tmp_path, architecture))


@pytest.mark.parametrize("architecture", TARGETS.names())
def test_tied_embeddings(tmp_path: Path, architecture: str) -> None:
    check_against_transformers(tiny_model_dir(tmp_path, architecture, tie_word_embeddings=True))


@pytest.mark.parametrize("scaling", sorted(ROPE_SCALINGS))
def test_rope_scaling(tmp_path: Path, scaling: str) -> None:
    parameters = {"rope_theta": 10000.0, **ROPE_SCALINGS[scaling]}
    check_against_transformers(tiny_model_dir(tmp_path, "llama", rope_parameters=parameters))


def test_attention_and_mlp_biases(tmp_path: Path) -> None:
    check_against_transformers(tiny_model_dir(tmp_path, "llama", attention_bias=True, mlp_bias=True))


def edit_weights(model_dir: Path, **changes: torch.Tensor | None) -> None:
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    model_dir = tiny_model_dir(tmp_path, "llama")
    edit_weights(model_dir, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        load_target(model_dir, torch.float32, 64)


def test_a_leftover_tensor_is_named(tmp_path: Path) -> None:
    model_dir = tiny_model_dir(tmp_path, "llama")
    edit_weights(model_dir, **{"model.layers.0.self_attn.q_norm.weight": torch.ones(16)})
    with pytest.raises(CheckpointError, match="q_norm"):
        load_target(model_dir, torch.float32, 64)


WINDOWS: dict[str, tuple[str, dict[str, Any], tuple[int | None, ...]]] = {
    "mistral": ("mistral", {"sliding_window": 9}, (9, 9, 9)),
    "qwen2, the upper layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
        (None, 9, 9),
    ),
    "qwen3, layer by layer": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        (5, None, 5),
    ),
    "qwen2, switched off": ("qwen2", {"sliding_window": 9}, (None, None, None)),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_sliding_windows(tmp_path: Path, name: str) -> None:
    architecture, fields, windows = WINDOWS[name]
    model_dir = tiny_model_dir(tmp_path, architecture, **fields)
    assert load_target(model_dir, torch.float32, 64).config.windows == windows
    check_against_transformers(model_dir)


def test_dynamic_scaling_beyond_the_trained_length(tmp_path: Path) -> None:
    """For a prompt of exactly the served length, transformers computes the same angles."""
    parameters = {"rope_theta": 10000.0, **ROPE_SCALINGS["dynamic"]}
    model_dir = tiny_model_dir(tmp_path, "llama", rope_parameters=parameters, max_position_embeddings=20)
    check_against_transformers(model_dir, max_positions=37)
    unscaled = {"rope_theta": 10000.0, "rope_type": "default"}
    other = tiny_model_dir(tmp_path / "b", "llama", rope_parameters=unscaled, max_position_embeddings=20)
    tokens = list(range(3, 40))
    scaled, plain = (
        dense_logits(load_target(path, torch.float32, 37), tokens) for path in (model_dir, other)
    )
    assert np.abs(scaled - plain).max() > 1e-3


def test_int8_weights_change_the_logits_a_little(tmp_path: Path) -> None:
    model_dir = tiny_model_dir(tmp_path)
    tokens = list(range(3, 23))
    exact, rounded = (
        dense_logits(load_target(model_dir, torch.float32, 64, quantization), tokens)
        for quantization in ("none", "int8")
    )
    error = np.abs(rounded - exact).mean() / np.abs(exact).mean()
    assert 1e-5 < error < 0.1
