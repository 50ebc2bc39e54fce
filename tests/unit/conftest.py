"""Unit tests cannot reach outside their process: no Ray, no network, no GPU."""

import importlib.util
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zmq

HAS_RAY = importlib.util.find_spec("ray") is not None  # floors 0-3 run without it


class ForbiddenInUnitTestError(RuntimeError):
    """A unit test did what only tests/ray, tests/e2e or tests/gpu may do."""


def _forbid(what: str) -> Callable[..., Any]:
    def raise_error(*args: object, **kwargs: object) -> None:
        raise ForbiddenInUnitTestError(f"unit tests must not {what}; move the test or pass a fake")

    return raise_error


def _only_inproc(original: Callable[..., Any]) -> Callable[..., Any]:
    def connect_or_bind(self: zmq.Socket, address: str, *args: object, **kwargs: object) -> Any:
        if not address.startswith("inproc://"):
            _forbid(f"open a zmq socket ({address})")()
        return original(self, address, *args, **kwargs)

    return connect_or_bind


@pytest.fixture(autouse=True)
def _no_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    # Sockets may exist, since event loops wake themselves through a pair of them.
    for method in ("connect", "connect_ex", "bind"):
        monkeypatch.setattr(socket.socket, method, _forbid("use sockets"))
    monkeypatch.setattr(socket, "getaddrinfo", _forbid("look up hosts"))
    for method in ("connect", "bind"):
        monkeypatch.setattr(zmq.Socket, method, _only_inproc(getattr(zmq.Socket, method)))
    if HAS_RAY:
        monkeypatch.setattr("ray.init", _forbid("start Ray"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
