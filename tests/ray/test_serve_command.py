"""`dspark-ray serve` from start to end, on a Ray cluster of its own: it answers, stops, and gives up."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ray.conftest import _ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "from dspark_ray.cli.main import app; app()"
TIMEOUT_S = 120.0


def end(child: "subprocess.Popen[str]") -> None:
    """Whatever state it is in, with its cluster."""
    if child.poll() is None:
        child.terminate()
        try:
            child.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()


def start(folder: Path, import_path: str, **args: Any) -> "subprocess.Popen[str]":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    document = {
        "proxy_location": "HeadOnly",
        "http_options": {"port": 1},  # what --port says counts
        "applications": [
            {"name": "served", "route_prefix": "/llm", "import_path": import_path, "args": args}
        ],
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(document))
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    python_path = f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "serve", str(path), "--port", str(port)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        cwd=folder,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup's children ignore it
        env={**environment, **_ENVIRONMENT, "PYTHONPATH": python_path, "COLUMNS": "300"},
    )


@pytest.fixture
def empty_dir(tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


def test_it_serves_until_it_is_asked_to_end(model_dir: Path, tmp_path: Path) -> None:
    child = start(
        tmp_path,
        "tests.ray.app_builder:build_fake_app",
        model={"source": str(model_dir), "max_model_len": 256},
    )
    try:
        assert child.stderr is not None
        assert any("ready at http://127.0.0.1:" in line for line in child.stderr)  # ends with the child
        child.send_signal(signal.SIGHUP)
        _, rest = child.communicate(timeout=TIMEOUT_S)
        assert child.returncode == 0
        assert "shutting down" in rest
    finally:
        end(child)


def test_a_deployment_that_fails_ends_it_with_the_reason(tmp_path: Path, empty_dir: Path) -> None:
    model = {"source": str(empty_dir)}
    child = start(tmp_path, "tests.ray.app_builder:build_fake_app", model=model)
    try:
        _, told = child.communicate(timeout=TIMEOUT_S)
    finally:
        end(child)
    assert child.returncode == 1
    last = [line for line in told.splitlines() if line.startswith("error: ")][-1]
    assert "application 'served' could not be deployed" in last
    assert "no config.json" in last
