"""Random cached sequences and a tiny real target with a data file."""

import json
from pathlib import Path

import pytest
import torch

from dspark_ray.training.cache import CachedSequence
from dspark_ray.training.config import TrainingConfig
from tests.tiny import tiny_model_dir

VOCAB_SIZE = 128
TOP_K = 4


def make_sequence(
    prompt_length: int, response_length: int, *, tap_size: int = 6, temperature: float = 0.0, seed: int = 0
) -> CachedSequence:
    """Random tokens, taps and target probabilities."""
    generator = torch.Generator().manual_seed(seed)
    length = prompt_length + response_length
    return CachedSequence(
        tokens=torch.randint(3, VOCAB_SIZE, (length,), generator=generator),
        prompt_length=prompt_length,
        taps=torch.randn(length, tap_size, generator=generator).bfloat16(),
        top_ids=torch.randint(3, VOCAB_SIZE, (response_length, TOP_K), generator=generator),
        top_probs=torch.rand(response_length, TOP_K, generator=generator) / TOP_K,
        temperature=temperature,
    )


def write_samples(path: Path, count: int, *, seed: int = 0) -> None:
    """`count` samples of random tokens, answers of 12 to 31 tokens that end with token 2."""
    generator = torch.Generator().manual_seed(seed)
    with path.open("a", encoding="utf-8") as file:
        for number in range(count):
            tokens = torch.randint(3, VOCAB_SIZE, (20 + number % 20,), generator=generator).tolist()
            sample = {"prompt_ids": tokens[:9], "response_ids": [*tokens[9:], 2], "temperature": number % 2}
            file.write(json.dumps(sample) + "\n")


@pytest.fixture
def tiny_run(tmp_path: Path) -> TrainingConfig:
    """A configuration over a tiny target and 40 samples; trains in a second."""
    write_samples(tmp_path / "data.jsonl", 40)
    return TrainingConfig.model_validate(
        {
            "target": tiny_model_dir(tmp_path, dtype=torch.bfloat16),
            "data": [tmp_path / "*.jsonl"],
            "output": tmp_path / "run",
            "architecture": {
                "num_layers": 1,
                "block_size": 3,
                "target_layer_ids": [0, 1],
                "draft_vocab_size": 64,
                "mask_token_id": 0,
                "markov_rank": 8,
                "init_layers": [2],
            },
            "cache": {"folder": tmp_path / "cache", "top_k": 4, "max_length": 64},
            "optimizer": {"total_steps": 6, "warmup_steps": 2},
            "sequences_per_step": 2,
            "anchors_per_sequence": 8,
            "log_steps": 1,
            "validation_every": 10,
            "validation_steps": 3,
        }
    )
