"""The guards of conftest.py hold: a unit test cannot start Ray, open a connection or see a GPU."""

import asyncio
import socket

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
