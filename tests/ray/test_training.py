"""A training as a Ray Train job: the course of one process, a lost worker replaced, errors as they are."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from ray.util import list_named_actors

from dspark_ray.core.errors import ConfigError
from dspark_ray.models.drafters.checkpoint import load_checkpoint
from dspark_ray.runtime.train_job import TrainingJob, train_on_ray
from dspark_ray.training.config import TrainingConfig
from dspark_ray.training.trainer import train
from tests.tiny import tiny_model_dir
from tests.unit.training.conftest import write_samples

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

STEPS = 60


RAYS_OWN = {"_train_state_actor", "AutoscalingCoordinator"}  # namespaces


@pytest.fixture(scope="module", autouse=True)
def _actors_that_ray_keeps(cluster: str) -> Iterator[None]:
    """Ray Train starts two that live as long as the cluster; the cluster is checked for what is left."""
    yield
    for entry in list_named_actors(all_namespaces=True):
        if entry["namespace"] in RAYS_OWN:
            with contextlib.suppress(ValueError):  # gone by itself
                ray.kill(ray.get_actor(entry["name"], entry["namespace"]))


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    write_samples(tmp_path / "data.jsonl", 40)
    return {
        "target": str(tiny_model_dir(tmp_path, dtype=torch.bfloat16)),
        "data": [str(tmp_path / "data.jsonl")],
        "architecture": {"kind": "eagle3", "block_size": 3, "target_layer_ids": [0], "draft_vocab_size": 64},
        "optimizer": {"total_steps": STEPS, "warmup_steps": 2},
        "sequences_per_step": 2,
        "anchors_per_sequence": 8,
        "log_steps": 1,
        "save_minutes": 0.005,
        "validation_every": 10,
        "num_threads": 1,
        "bf16": False,
    }


def config(raw: dict[str, Any], folder: Path) -> TrainingConfig:
    own = {"output": folder / "run", "cache": {"folder": folder / "cache", "top_k": 4, "max_length": 64}}
    return TrainingConfig.model_validate(raw | own)


def kill_a_worker(state: Path) -> None:
    """The first Ray Train worker that is found once a state is saved."""
    while not state.exists():
        time.sleep(0.02)
    workers = [p for p in psutil.process_iter(["cmdline"]) if "RayTrainWorker" in str(p.info["cmdline"])]
    os.kill(workers[0].pid, signal.SIGKILL)


def test_the_course_of_one_process_though_a_worker_dies(tmp_path: Path, raw: dict[str, Any]) -> None:
    alone = config(raw, tmp_path / "alone")
    train(alone, stop=lambda: False)
    shared = config(raw, tmp_path / "shared")
    killer = threading.Thread(target=kill_a_worker, args=(shared.output / "state.pt",), daemon=True)
    killer.start()
    checkpoint = train_on_ray(TrainingJob(shared, num_workers=2, max_failures=1))
    assert not killer.is_alive()
    assert checkpoint is not None
    assert load_checkpoint(checkpoint)[0] == load_checkpoint(alone.output / "checkpoint")[0]
    ours, theirs = (torch.load(run.output / "state.pt") for run in (shared, alone))
    assert ours["step"] == theirs["step"] == STEPS
    for name, weight in theirs["network"].items():
        torch.testing.assert_close(ours["network"][name], weight, atol=2e-4, rtol=1e-2)


def test_an_error_of_the_trainer_is_told_as_it_is(tmp_path: Path, raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="40 usable samples"):
        train_on_ray(TrainingJob(config(raw | {"validation_every": 41}, tmp_path / "few")))
