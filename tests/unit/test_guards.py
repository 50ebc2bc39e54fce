"""The guards of conftest.py hold: a unit test cannot start Ray, open a connection or see a GPU."""

import asyncio
import re
import socket
from pathlib import Path

import pytest
import torch
import zmq

from tests.unit.conftest import ForbiddenInUnitTestError


def test_ray_cannot_start() -> None:
    ray = pytest.importorskip("ray")
    with pytest.raises(ForbiddenInUnitTestError, match="start Ray"):
        ray.init()


def test_no_connection_and_no_server() -> None:
    with pytest.raises(ForbiddenInUnitTestError):
        socket.create_connection(("127.0.0.1", 1))
    with socket.socket() as sock, pytest.raises(ForbiddenInUnitTestError):
        sock.bind(("127.0.0.1", 0))


def test_zmq_stays_in_the_process() -> None:
    context = zmq.Context()
    with context.socket(zmq.PAIR) as sock:
        sock.bind("inproc://here")
        with pytest.raises(ForbiddenInUnitTestError, match="tcp"):
            sock.bind("tcp://127.0.0.1:*")
    context.term()


async def test_event_loops_work() -> None:
    await asyncio.sleep(0)


def test_no_gpu() -> None:
    assert not torch.cuda.is_available()


def test_no_code_comes_with_a_model() -> None:
    """Nothing unpickles weights, and nothing lets a model's repository run its own Python."""
    root = Path(__file__).resolve().parents[2]
    sources = [
        path for name in ("dspark_ray", "deployments", "kernels") for path in (root / name).rglob("*.py")
    ]
    assert len(sources) > 100
    for path in sources:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"trust_remote_code\W*=\W*True", text), path
        assert not re.search(r"^\s*(import|from) pickle\b", text, re.MULTILINE), path
        for call in re.findall(r"torch\.load\(.*", text):
            assert "weights_only=True" in call, (path, call)
