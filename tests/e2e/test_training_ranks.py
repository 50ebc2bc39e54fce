"""Two processes by torchrun train what one does: the same course, the same weights."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from dspark_ray.training.config import TrainingConfig
from dspark_ray.training.trainer import train
from tests.tiny import tiny_model_dir
from tests.unit.training.conftest import write_samples

pytestmark = pytest.mark.e2e


def test_two_processes_train_what_one_does(tmp_path: Path) -> None:
    write_samples(tmp_path / "data.jsonl", 40)
    raw = {
        "target": str(tiny_model_dir(tmp_path, dtype=torch.bfloat16)),
        "data": [str(tmp_path / "data.jsonl")],
        "output": str(tmp_path / "one"),
        "architecture": {
            "kind": "eagle3",
            "block_size": 3,
            "target_layer_ids": [0, 1],
            "draft_vocab_size": 64,
        },
        "cache": {"folder": str(tmp_path / "cache-one"), "top_k": 4, "max_length": 64},
        "optimizer": {"total_steps": 5, "warmup_steps": 2},
        "sequences_per_step": 3,
        "anchors_per_sequence": 8,
        "validation_every": 10,
        "bf16": False,
    }
    train(TrainingConfig.model_validate(raw))
    raw |= {"output": str(tmp_path / "two")}
    raw["cache"]["folder"] = str(tmp_path / "cache-two")
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(raw))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    finished = subprocess.run(
        [*command, "-m", "dspark_ray.training.trainer", str(tmp_path / "two.yaml")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    one, two = (torch.load(tmp_path / name / "state.pt") for name in ("one", "two"))
    assert one["step"] == two["step"] == 5
    assert one["blocks"] == two["blocks"]
    for name, weight in one["network"].items():
        torch.testing.assert_close(two["network"][name], weight, atol=1e-5, rtol=1e-3)
