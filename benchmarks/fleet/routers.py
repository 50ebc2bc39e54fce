"""Our router against Serve's default: the same bursty open-loop load on unequal replicas of the timed engine.

    python benchmarks/fleet/routers.py [--seconds 30] [--rate 1.2] [--seed 0] [--name fleet-routers]

The whole application runs: Ray, Serve, proxy, ingress, router, central scheduler. Only the model is replaced,
by one that sleeps: figures are simulated, and depend on the machine as far as it is too busy to wake in time.
Goodput counts the tokens of requests whose time per output token kept to --tpot-ms and whose first token came
within --ttft-ms. Writes benchmarks/results/NAME.json.
"""

import argparse
import json
import os
import shlex
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ray
from ray import serve

from deployments.app import build_app
from dspark_ray.core.config import AppConfig, parse_app_config
from dspark_ray.models.prompts import RawPrompt
from dspark_ray.profiling.load import Arrival, ClientTiming, LoadReport, drive_open
from dspark_ray.scheduling.step_table import StepTable

PROJECT_DIR = Path(__file__).resolve().parents[2]
RESULTS_DIR = PROJECT_DIR / "benchmarks" / "results"
MODEL = "timed"
ROUTERS = ("pow2", "goodput")
READY_TIMEOUT_S = 180.0
NUM_SESSIONS, PREFIX_WORDS = 6, 120


def config(router: str, folder: Path) -> AppConfig:
    """Two slow replicas and one that is three times as fast. Long steps keep events few."""
    for name, factor in (("fast", 1.0), ("slow", 3.0)):
        verify_ms = factor * np.array([60.0, 66.0, 84.0, 300.0])
        table = StepTable(
            rows=[1, 16, 64, 512],
            verify_ms=verify_ms,
            requests=[1, 16],
            draft_ms=[2.0 * factor, 4.0 * factor],
        )
        table.save(folder / f"{name}.json")
    tables = [str(folder / f"{name}.json") for name in ("fast", "slow", "slow")]
    timed = {"step_tables": tables, "acceptance": [[0.85, 0.8], [0.6, 0.5]]}
    return parse_app_config(
        {
            "model": {"id": MODEL},
            "engine": {"kind": "timed", "timed": timed, "max_running": 8},
            "speculation": {"num_draft_tokens": 4},
            "serving": {"num_replicas": 3, "replica_cpus": 0.1, "router": router},
        }
    )


def bursty(seconds: float, rate: float, seed: int) -> list[Arrival]:
    """Poisson arrivals, three times as many in every second quarter; sessions share a long beginning."""
    rng = np.random.default_rng(seed)
    arrivals, at_s = [], 0.0
    while at_s < seconds:
        in_burst = int(8 * at_s / seconds) % 2 == 1
        at_s += float(rng.exponential(1.0 / (rate * (3.0 if in_burst else 1.0))))
        session = int(rng.integers(NUM_SESSIONS))
        text = f"session {session} " + "and so on " * PREFIX_WORDS + str(len(arrivals))
        key = {"prompt_cache_key": f"{session}"}
        prompt = RawPrompt(len(arrivals) + 1, text=text)
        arrivals.append(Arrival(at_s, prompt, int(rng.integers(16, 65)), key))
    return arrivals


def figures(report: LoadReport, ttft_ms: float, tpot_ms: float) -> dict[str, Any]:
    """What the clients saw, and the tokens per second of those who were served in time."""

    def in_time(one: ClientTiming) -> bool:
        return not one.error and one.ttft_ms <= ttft_ms and (one.tpot_ms or 0.0) <= tpot_ms

    good = [one for one in report.timings if in_time(one)]
    return {
        "goodput_tokens_per_s": sum(one.num_tokens for one in good) / report.wall_s,
        "share_in_time": len(good) / len(report.timings),
        **report.figures(),
    }


def measure(router: str, folder: Path, port: int, options: argparse.Namespace) -> dict[str, Any]:
    """One application from its start to its end."""
    serve.run(build_app(config(router, folder)), name=router, route_prefix=f"/{router}")
    url = f"http://127.0.0.1:{port}/{router}"
    deadline = time.monotonic() + READY_TIMEOUT_S
    while httpx.get(f"{url}/ready", timeout=30.0).status_code != 200:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url} is not ready after {READY_TIMEOUT_S:g} s")
        time.sleep(0.5)
    drive_open(url, MODEL, bursty(3.0, 1.0, options.seed + 1))  # loads have been reported
    found = figures(
        drive_open(url, MODEL, bursty(options.seconds, options.rate, options.seed)),
        options.ttft_ms,
        options.tpot_ms,
    )
    serve.delete(router)
    return found


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=1.2, help="requests/s between bursts")
    parser.add_argument("--ttft-ms", type=float, default=2000.0)
    parser.add_argument("--tpot-ms", type=float, default=100.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="fleet-routers", help="of the result file")
    options = parser.parse_args()

    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20)
    serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
    result: dict[str, Any] = {
        "label": "timed engine: simulated figures",
        "command": shlex.join(["python", "benchmarks/fleet/routers.py", *sys.argv[1:]]),
        "limits": {"ttft_ms": options.ttft_ms, "tpot_ms": options.tpot_ms},
    }
    try:
        with tempfile.TemporaryDirectory() as folder:
            for router in ROUTERS:
                result[router] = measure(router, Path(folder), port, options)
                print(router, json.dumps(result[router], indent=1))
    finally:
        serve.shutdown()
        ray.shutdown()
    path = RESULTS_DIR / f"{options.name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path.relative_to(PROJECT_DIR)}")


if __name__ == "__main__":
    main()
