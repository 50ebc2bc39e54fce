"""Every command of the documents that a test can run is run, in a folder that looks like the checkout.

How, and which cannot be: `tests/documented.py`. Long ones are marked `docs`: `make test-docs`.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dspark_ray.cli.main import app
from tests.documented import TABLE, Run, Serves, filled
from tests.documents import PAGES, ROOT, blocks
from tests.tiny import tiny_chat_model_dir
from tests.unit.training.conftest import write_samples

pytestmark = pytest.mark.e2e

SHELL = re.compile(r"[|>&$;]")
START_S = 180.0
LINKED = (
    "cluster",
    "configs",
    "deployments",
    "dspark_ray",
    "kernels",
    "models",
    "tests",
    "Makefile",
    "pyproject.toml",
)
PROMPT_FILES = ("users", "a", "b", "mt-bench", "self-written", "prompts")
# Data to which commands append: how much they write themselves depends on what else the machine does.
WRITTEN_BEFORE = ("data/earlier.jsonl", "data/first.jsonl", "held-out.jsonl")
QUESTIONS = ("Count from one to ten.", "Why is the sky blue?", "Name three colours.", "What is a tree?")
SHIPPED = ROOT / "models" / "smollm2-135m-dspark-block7"


@dataclass(frozen=True)
class Workspace:
    """A folder like the checkout (links, save where commands write), with the files that commands name."""

    folder: Path
    tiny_model: Path

    def values(self, port: int) -> dict[str, str]:
        url = f"http://127.0.0.1:{port}"
        return {"port": str(port), "url": url, "venv": sys.prefix, "tiny_model": str(self.tiny_model)}

    def environment(self) -> dict[str, str]:
        """This environment's programs and this checkout's modules; a Ray cluster of one's own."""
        own = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        path = f"{Path(sys.executable).parent}{os.pathsep}{own.get('PATH', '')}"
        modules = f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"
        settings = {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "RAY_worker_niceness": "0"}
        return {**own, **settings, "PATH": path, "PYTHONPATH": modules}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_yaml(path: Path, content: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(content), encoding="utf-8")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    folder = tmp_path_factory.mktemp("checkout")
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "benchmarks", folder / "benchmarks", ignore=shutil.ignore_patterns("results"))
    shutil.copy(ROOT / ".pre-commit-config.yaml", folder)
    (folder / "runs" / "data").mkdir(parents=True)
    for name in WRITTEN_BEFORE:
        write_samples(folder / "runs" / name, 64)
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    for name in PROMPT_FILES:
        lines = (json.dumps({"turns": [question]}) + "\n" for question in QUESTIONS)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    arrivals = ({"arrived_ms": 400.0 * i, "prompt_tokens": 8, "output_tokens": 4} for i in range(4))
    (folder / "log.jsonl").write_text("".join(json.dumps(one) + "\n" for one in arrivals))
    tiny = tiny_chat_model_dir(folder, dtype=torch.bfloat16, max_position_embeddings=1024)
    write_yaml(folder / "tiny-training.yaml", tiny_training(tiny))
    write_yaml(folder / "tiny.yaml", served(lambda args: to_tiny(args, tiny)))
    write_drafters(folder / "drafters")
    return Workspace(folder, tiny)


def write_drafters(folder: Path) -> None:
    """v1, the shipped drafter, with a calibration apart; v2, which has other weights."""
    for name in ("v1", "v2"):
        (folder / name).mkdir(parents=True)
        shutil.copy(SHIPPED / "config.json", folder / name)
    weights = load_file(SHIPPED / "model.safetensors")
    save_file(weights, folder / "v1" / "model.safetensors")
    other = {name: w * 1.01 if w.is_floating_point() else w for name, w in weights.items()}
    save_file(other, folder / "v2" / "model.safetensors")
    shutil.copy(SHIPPED / "temperatures.json", folder / "v1" / "new.json")


def served(change: Any, port: int = 8000) -> dict[str, Any]:
    """The default configuration with other arguments."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "smollm2-135m-cpu.yaml").read_text())
    change(document["applications"][0]["args"])
    document["http_options"]["port"] = port
    return document


def to_tiny(args: dict[str, Any], model: Path) -> None:
    args["model"].update(id="tiny", source=str(model), max_model_len=512)
    args["engine"].update(kv_num_blocks=512, num_threads=1)
    args["speculation"]["drafter"]["path"] = "runs/smollm2-dspark-block7/checkpoint"


def tiny_training(model: Path) -> dict[str, Any]:
    """The documented training configuration for a target of three layers, with 6 steps."""
    config: dict[str, Any] = yaml.safe_load(
        (ROOT / "configs" / "training" / "smollm2-dspark-block7.yaml").read_text()
    )
    config["target"] = str(model)
    config["architecture"].update(
        num_layers=1, target_layer_ids=[0, 1], draft_vocab_size=64, init_layers=[2], markov_rank=8
    )
    config["optimizer"].update(total_steps=6, warmup_steps=2)
    config.update(sequences_per_step=2, anchors_per_sequence=8, num_threads=1)
    return config


@contextmanager
def serving(workspace: Workspace, command: str, how: Serves, port: int) -> Iterator[str]:
    """The running command's URL, once it is ready. It is ended as by Ctrl-C."""
    config = served(lambda args: args["speculation"].update(hot_swap={"load_from": "drafters"}), port)
    write_yaml(workspace.folder / "served.yaml", config)
    line = filled(command, how.less, workspace.values(port))
    url, log = f"http://127.0.0.1:{port}", workspace.folder / f"{port}.log"
    with log.open("w") as told:
        child = subprocess.Popen(
            ["bash", "-c", "exec " + line],
            **{"cwd": workspace.folder, "env": workspace.environment(), "stdout": told, "stderr": told},
        )
    try:
        deadline = time.monotonic() + START_S
        while not answers(url + how.ready):
            assert child.poll() is None, f"{line} has ended:\n{log.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"{line} is not ready:\n{log.read_text()[-3000:]}"
            time.sleep(0.5)
        yield url
    finally:
        end(child)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


def end(child: "subprocess.Popen[bytes]") -> None:
    """The program itself, which may be a child of make's; what is left after a minute is killed."""
    if child.poll() is not None:
        return
    family = psutil.Process(child.pid)
    programs = (
        [one for one in family.children() if one.name() != "sh"] if family.name() == "make" else [family]
    )
    for one in programs:
        one.send_signal(signal.SIGINT)
    try:
        child.wait(60)
    except subprocess.TimeoutExpired:
        child.kill()
        raise


@pytest.fixture(scope="module")
def server(workspace: Workspace) -> Iterator[str]:
    """What `make serve` serves: the default model, with drafters that may be swapped."""
    how = TABLE["make serve"]
    assert isinstance(how, Serves)
    with serving(workspace, "make serve", how, free_port()) as url:
        yield url


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def carried_out(line: str, how: Run, workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a command says. The program's own run in this process, which has torch loaded."""
    words = [] if SHELL.search(line) else shlex.split(line)
    if words[:1] == ["dspark-ray"] and not how.typed:
        monkeypatch.chdir(workspace.folder)
        result = CliRunner().invoke(app, words[1:], env={"COLUMNS": "200"})
        assert result.exit_code == how.status, f"{line}\n{result.output}\n{result.exception!r}"
        return result.output
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        input=how.typed,
        capture_output=True,
        text=True,
        cwd=workspace.folder,
        env=workspace.environment(),
        timeout=570,
    )
    assert done.returncode == how.status, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def rows(kind: type) -> list[Any]:
    """The table's rows of a kind, long ones marked; those that need the server are last: it starts late."""
    marks = {True: [pytest.mark.docs, pytest.mark.timeout(600)], False: []}
    table = sorted(TABLE.items(), key=lambda row: isinstance(row[1], Run) and row[1].served)
    return [
        pytest.param(command, how, id=command[:70], marks=marks[how.long])
        for command, how in table
        if isinstance(how, kind)
    ]


@pytest.mark.parametrize(("command", "how"), rows(Run))
def test_it_runs(
    command: str,
    how: Run,
    workspace: Workspace,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if how.needs and shutil.which(how.needs, path=workspace.environment()["PATH"]) is None:
        pytest.skip(f"no {how.needs} here")
    for earlier in how.after:
        made_by = TABLE[earlier]
        assert isinstance(made_by, Run)
        if not all((workspace.folder / path).exists() for path in made_by.makes):
            test_it_runs(earlier, made_by, workspace, request, monkeypatch)
    port = httpx.URL(request.getfixturevalue("server")).port if how.served else None
    values = workspace.values(port or 0)
    line = filled(command, how.less, values)
    if how.meanwhile is None:
        told = carried_out(line, how, workspace, monkeypatch)
    else:
        told = while_another(line, filled(how.meanwhile, how.less, values), workspace)
    assert re.search(how.prints, told), told
    for path in how.makes:
        assert (workspace.folder / path).stat().st_size > 0, path


def while_another(line: str, other: str, workspace: Workspace) -> str:
    """What `line` says, which ends because of `other`; that is run until it succeeds."""
    settings: dict[str, Any] = {"cwd": workspace.folder, "env": workspace.environment(), "text": True}
    waiting = subprocess.Popen(["bash", "-c", "exec " + line], stdout=subprocess.PIPE, **settings)
    try:
        deadline = time.monotonic() + START_S
        while waiting.poll() is None and time.monotonic() < deadline:
            if subprocess.run(["bash", "-c", other], **settings).returncode == 0:
                break
            time.sleep(0.5)
        told, _ = waiting.communicate(timeout=60)
    finally:
        waiting.kill()
    assert waiting.returncode == 0, told
    return str(told)


@pytest.mark.parametrize(("command", "how"), rows(Serves))
def test_it_serves(command: str, how: Serves, workspace: Workspace, request: pytest.FixtureRequest) -> None:
    if how.needs and shutil.which(how.needs) is None:
        pytest.skip(f"no {how.needs} here")
    if command == "make serve":
        assert answers(request.getfixturevalue("server") + how.ready)
        return
    with serving(workspace, command, how, free_port()):
        pass


def test_the_readmes_client_runs(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (b for b in blocks(ROOT / "README.md") if b.language == "python")
    assert "stream=True" in block.text
    source = block.text.replace("http://127.0.0.1:8000", server)
    exec(compile(source.replace("stream=True", "stream=True, max_tokens=24"), "README.md", "exec"), {})
    assert len(capsys.readouterr().out.split()) > 5


def test_there_is_no_other_python() -> None:
    """The toy's is run by tests/unit/test_docs.py; another block would need a test of its own."""
    pages = [block.page for page in PAGES for block in blocks(page) if block.language == "python"]
    assert sorted(pages) == ["README.md", "docs/toy.md"]
