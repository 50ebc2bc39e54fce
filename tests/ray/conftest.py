"""One local cluster, and one application with two replicas of a fake engine, for all tests of this folder."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.util import list_named_actors

from dspark_ray.core.config import AppConfig, parse_app_config
from dspark_ray.core.types import EngineStats
from dspark_ray.runtime.names import NAMESPACE, is_engine_name, scheduler_name
from tests.ray.app_builder import build_fake_app
from tests.tiny import tiny_chat_model_dir

APP = "fleet"  # not the name of the shipped configurations: no name may be wired in
ROUTE = "/llm"
CAP = 4000.0

_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",  # else the workers starve beside anything else that runs here
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}


def eventually(what: Callable[[], Any], timeout_s: float = 30.0, period_s: float = 0.05) -> Any:
    """The first true value of `what()`; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := what()):
        assert time.monotonic() < deadline, f"still {value!r} after {timeout_s} s"
        time.sleep(period_s)
    return value


@dataclass
class Fleet:
    """A running application and what its tests ask it."""

    url: str
    app_name: str = APP
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, timeout=60.0)

    def engines(self) -> dict[str, Any]:
        """Engine actors by name."""
        listed = [entry["name"] for entry in list_named_actors(all_namespaces=True)]
        names = [name for name in listed if is_engine_name(self.app_name, name)]
        return {name: ray.get_actor(name, NAMESPACE) for name in names}

    def stats(self) -> dict[str, EngineStats]:
        found = {}
        for name, engine in self.engines().items():
            try:
                stats = ray.get(engine.stats.remote(), timeout=10)
            except ray.exceptions.RayError:
                continue
            if stats is not None:
                found[name] = stats
        return found

    def busy_engine(self) -> str | None:
        return next((name for name, stats in self.stats().items() if stats.num_running), None)

    def is_idle(self) -> bool:
        return not any(stats.num_running + stats.num_waiting for stats in self.stats().values())

    def num_ready(self) -> int:
        return sum(stats.ready for stats in self.stats().values())

    def scheduler(self) -> Any:
        return ray.get_actor(scheduler_name(self.app_name), NAMESPACE)

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(name + " ")))


@pytest.fixture(scope="session")
def http_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def cluster(http_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a local cluster's proxy; nothing of ours may be left when Serve has shut down."""
    os.environ.update(_ENVIRONMENT, DSPARK_CACHE_DIR=str(tmp_path_factory.mktemp("cache")))
    # "local": else the cluster that somebody started on this machine last would be taken.
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=100 << 20,
        namespace="tests",
    )
    serve.start(http_options={"host": "127.0.0.1", "port": http_port}, proxy_location="HeadOnly")
    yield f"http://127.0.0.1:{http_port}"
    serve.shutdown()
    try:
        eventually(lambda: not list_named_actors(all_namespaces=True), timeout_s=10.0)
    finally:
        ray.shutdown()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def fleet_config(model_dir: Path) -> AppConfig:
    return parse_app_config(
        {
            "model": {"id": "fake", "source": str(model_dir), "max_model_len": 4096},
            "engine": {"max_running": 16, "max_waiting": 16},
            "speculation": {"drafter": {"kind": "ngram"}},
            "scheduler": {"policy": "shared_cap", "cap_draft_tokens_per_s": CAP},
            "serving": {"num_replicas": 2, "max_ongoing_requests": 16},
        }
    )


@pytest.fixture(scope="session")
def fleet(cluster: str, fleet_config: AppConfig) -> Iterator[Fleet]:
    serve.run(build_fake_app(fleet_config), name=APP, route_prefix=ROUTE)
    fleet = Fleet(cluster + ROUTE)
    eventually(lambda: fleet.client.get("/ready").status_code == 200)
    yield fleet
    fleet.client.close()
