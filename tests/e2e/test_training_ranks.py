"""Several processes train what one does, each with the whole drafter or with shards of it, and continue each
other's runs; a killed run continues to the same curve."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dspark_ray.training.config import TrainingConfig
from dspark_ray.training.trainer import train
from tests.tiny import tiny_model_dir
from tests.training_process import StopAt
from tests.unit.training.conftest import write_samples

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
LAST_STEP = 5
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A configuration over a tiny target; in fp32, so that sums in another order differ little."""
    folder = tmp_path_factory.mktemp("data")
    write_samples(folder / "data.jsonl", 40)
    return {
        "target": str(tiny_model_dir(folder, dtype=torch.bfloat16)),
        "data": [str(folder / "data.jsonl")],
        "architecture": {
            "num_layers": 2,
            "block_size": 3,
            "target_layer_ids": [0, 1],
            "draft_vocab_size": 64,
            "mask_token_id": 0,
            "markov_rank": 8,
        },
        "optimizer": {"total_steps": LAST_STEP, "warmup_steps": 2},
        "sequences_per_step": 3,
        "anchors_per_sequence": 8,
        "log_steps": 1,
        "validation_every": 10,
        "bf16": False,
        "num_threads": 1,  # another number sums in another order
    }


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def eagle3(base: dict[str, Any]) -> dict[str, Any]:
    shape = {"kind": "eagle3", "block_size": 3, "target_layer_ids": [0, 1], "draft_vocab_size": 64}
    return {**base, "architecture": shape}


def run_config(folder: Path, base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    cache = {"folder": str(folder / "cache"), "top_k": 4, "max_length": 64}
    return {**base, "output": str(folder / "run"), "cache": cache, **changes}


def alone(folder: Path, base: dict[str, Any], until: int = LAST_STEP, **changes: Any) -> None:
    """One process, this one."""
    at = StopAt(until)
    config = TrainingConfig.model_validate(run_config(folder, base, **changes))
    train(config, [at], stop=lambda: at.reached)


def start(folder: Path, config: dict[str, Any], *, processes: int, until: int) -> subprocess.Popen[str]:
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    launcher = TORCHRUN if processes == 2 else []
    command = [
        sys.executable,
        *launcher,
        "-m",
        "tests.training_process",
        str(folder / "run.yaml"),
        str(until),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
    }
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def finish(process: subprocess.Popen[str]) -> str:
    """Its log."""
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors[-3000:]
    return errors


def state(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / "run" / "state.pt")
    return loaded


def losses(folder: Path) -> Iterator[tuple[int, float]]:
    """Steps and losses as they were logged; the last line of a killed process may be a part of one."""
    text = (folder / "run" / "metrics.jsonl").read_text()
    for line in text[: text.rfind("\n") + 1].splitlines():
        record = json.loads(line)
        if "loss" in record:
            yield record["step"], record["loss"]


def assert_same_course(one: Path, other: Path) -> None:
    """The same losses, weights, averages and moments, but for the order of sums."""
    expected, got = state(one), state(other)
    assert got["step"] == expected["step"] == LAST_STEP
    assert got["blocks"] == expected["blocks"]
    assert dict(losses(other)) == pytest.approx(dict(losses(one)), rel=1e-3)
    for part in ("network", "averaged"):
        for name, weight in expected[part].items():
            torch.testing.assert_close(got[part][name], weight, atol=1e-5, rtol=1e-3)
    for number, moments in expected["optimizer"]["state"].items():
        for name, moment in moments.items():
            ours = got["optimizer"]["state"][number][name]
            torch.testing.assert_close(ours, moment, atol=1e-5, rtol=1e-3)


def test_two_processes_train_what_one_does(tmp_path: Path, base: dict[str, Any]) -> None:
    base = eagle3(base)
    alone(tmp_path / "one", base)
    config = run_config(tmp_path / "two", base)
    finish(start(tmp_path / "two", config, processes=2, until=LAST_STEP))
    assert_same_course(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_shards_continue_a_whole_drafter_and_are_continued(
    tmp_path: Path, base: dict[str, Any], kind: str
) -> None:
    """One process until step 1, two with shards until step 4, one again; as if it had been one all along."""
    base = eagle3(base) if kind == "eagle3" else base
    alone(tmp_path / "one", base)
    folder = tmp_path / "mixed"
    alone(folder, base, until=1, parallel="fsdp")
    log = finish(start(folder, run_config(folder, base, parallel="fsdp"), processes=2, until=4))
    held, of = map(int, re.findall(r"holds (\d+) of (\d+) parameters", log)[0])
    assert 0.4 * of < held < 0.6 * of
    assert state(folder)["step"] == 4
    alone(folder, base, parallel="ddp")
    assert_same_course(tmp_path / "one", folder)


def test_a_killed_run_continues_to_the_same_curve(tmp_path: Path, base: dict[str, Any]) -> None:
    """SIGKILL in the middle of a step: the next start repeats what was not saved, bit for bit."""
    steps = 200
    long = {**base, "optimizer": {"total_steps": steps, "warmup_steps": 2}, "save_minutes": 0.005}
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    alone(straight, long, steps)
    process = start(killed, run_config(killed, long), processes=1, until=steps)
    deadline = time.monotonic() + 120
    while not (killed / "run" / "state.pt").exists() or len(list(losses(killed))) < 30:
        assert process.poll() is None, "it was to be killed before its end"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    saved, reached = state(killed)["step"], max(step for step, _ in losses(killed))
    assert 0 < saved <= reached < steps
    alone(killed, long, steps)
    expected = dict(losses(straight))
    resumed = list(losses(killed))
    assert [step for step, _ in resumed] == [*range(1, reached + 1), *range(saved + 1, steps + 1)]
    assert all(loss == expected[step] for step, loss in resumed)  # before and after, and what ran twice
    ours, theirs = state(killed)["network"], state(straight)["network"]
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
