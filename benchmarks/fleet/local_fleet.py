"""What the measurements of this folder share: a local cluster, an application on it, its processes.

Each cluster is its own, with its own ports and folder, whatever else runs on the machine. The processes
are found below this one, by the titles that Ray gives them.
"""

import json
import os
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import ray
from ray import serve
from ray.util import list_named_actors

from deployments.app import build_app
from dspark_ray.core.config import AppConfig
from dspark_ray.core.types import EngineStats
from dspark_ray.profiling.machine import machine_facts
from dspark_ray.runtime.names import NAMESPACE, engine_prefix
from dspark_ray.scheduling.step_table import StepTable

PROJECT_DIR = Path(__file__).resolve().parents[2]
RESULTS_DIR = PROJECT_DIR / "benchmarks" / "results"
READY_TIMEOUT_S = 180.0
TIMED_LABEL = "timed engine: simulated figures"

_ENVIRONMENT = {  # as `dspark-ray serve` has it
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",  # else the workers starve beside anything else that runs here
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.proxy.middlewares",
}


def free_port() -> int:
    """One on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def prepare_environment() -> None:
    """Before Ray starts: what its processes inherit. They find this project's modules, installed or not."""
    os.environ.pop("RAY_ADDRESS", None)
    paths = [str(PROJECT_DIR), str(PROJECT_DIR / "kernels"), os.environ.get("PYTHONPATH", "")]
    os.environ.update(_ENVIRONMENT, PYTHONPATH=os.pathsep.join(path for path in paths if path))


@contextmanager
def local_cluster() -> Iterator[str]:
    """A cluster of one node with Serve's proxy; its base URL."""
    prepare_environment()
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="dspark-", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local",
            num_cpus=8,
            include_dashboard=False,
            object_store_memory=100 << 20,
            log_to_driver=False,
            _temp_dir=folder,
        )
        try:
            serve.start(
                http_options={"host": "127.0.0.1", "port": port},
                proxy_location="HeadOnly",
                logging_config={"enable_access_log": False},
            )
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


@dataclass(frozen=True, slots=True)
class Application:
    """A running one."""

    name: str
    url: str

    def engines(self) -> dict[str, Any]:
        """Engine actors by replica id."""
        prefix = engine_prefix(self.name)
        names = [one["name"] for one in list_named_actors(all_namespaces=True)]
        return {
            name.removeprefix(prefix): ray.get_actor(name, NAMESPACE)
            for name in names
            if name.startswith(prefix)
        }

    def stats(self) -> dict[str, EngineStats]:
        """Of the engines that answer and are loaded, by replica id."""
        found = {}
        for name, engine in self.engines().items():
            try:
                stats = ray.get(engine.stats.remote(), timeout=5.0)
            except (ray.exceptions.RayError, ValueError):
                continue
            if stats is not None:
                found[name] = stats
        return found

    def num_ready(self) -> int:
        """Replicas that have passed their canary."""
        return sum(stats.ready for stats in self.stats().values())

    def answers(self) -> bool:
        """Whether its readiness route says yes."""
        try:
            return httpx.get(f"{self.url}/ready", timeout=10.0).status_code == 200
        except httpx.HTTPError:
            return False


@contextmanager
def running(base_url: str, config: AppConfig, name: str) -> Iterator[Application]:
    """The application with all its replicas ready; deleted afterwards."""
    serve.run(build_app(config), name=name, route_prefix=f"/{name}")
    application = Application(name, f"{base_url}/{name}")
    try:
        least = config.serving.least_replicas
        wait_until(lambda: application.answers() and application.num_ready() >= least, READY_TIMEOUT_S)
        yield application
    finally:
        serve.delete(name)


def wait_until(what: Callable[[], Any], timeout_s: float, period_s: float = 0.2) -> float:
    """Seconds until `what()` is true; `TimeoutError` after `timeout_s`."""
    started = time.monotonic()
    while not what():
        if time.monotonic() - started > timeout_s:
            raise TimeoutError(f"nothing came of it within {timeout_s:g} s")
        time.sleep(period_s)
    return time.monotonic() - started


def processes(title: str = "") -> list[psutil.Process]:
    """Those that this program has started, Ray's included, whose title contains `title`; oldest first."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if title in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue  # it has just ended
    return sorted(found, key=lambda one: one.pid)


def save_tables(
    folder: Path, factors: Sequence[float], rows: Sequence[int], verify_ms: Sequence[float]
) -> list[str]:
    """One step table a replica, each so many times as slow as `verify_ms` at `rows`; their paths."""
    paths = []
    for number, factor in enumerate(factors):
        path = folder / f"table-{number}.json"
        cost_ms = factor * np.array(verify_ms)
        StepTable(
            rows=list(rows), verify_ms=cost_ms, requests=[1, 16], draft_ms=[2.0 * factor, 4.0 * factor]
        ).save(path)
        paths.append(str(path))
    return paths


def header(label: str = TIMED_LABEL) -> dict[str, Any]:
    """What every result file begins with."""
    script = Path(sys.argv[0]).resolve().relative_to(PROJECT_DIR)
    return {
        "label": label,
        "command": shlex.join(["python", str(script), *sys.argv[1:]]),
        "machine": machine_facts(),
    }


def write_result(name: str, result: dict[str, Any]) -> Path:
    """benchmarks/results/NAME.json."""
    path = RESULTS_DIR / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path.relative_to(PROJECT_DIR)}")
    return path
