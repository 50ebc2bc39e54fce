"""Replicas that follow a load which rises and falls: one, three, and one again, on the timed engine.

    python benchmarks/fleet/autoscale.py [--seconds 210] [--name fleet-autoscale]

An open loop of streams through Serve's proxy; the autoscaling policy runs in Serve's controller as it does
anywhere. Once a second the replicas wanted and ready and the requests that wait are noted; what was offered,
and how long the first token took, come from the clients. The model sleeps, and Ray starts processes
on this machine: figures are simulated, the times until a replica is ready are this machine's.
Writes benchmarks/results/NAME.json and NAME.png. The exit status is 1 if the replicas did not follow.
"""

import argparse
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from local_fleet import Application, header, local_cluster, running, save_tables, wait_until, write_result
from ray import serve

from dspark_ray.core.config import AppConfig, parse_app_config
from dspark_ray.models.prompts import RawPrompt
from dspark_ray.profiling.load import Arrival, LoadReport, drive_open

MODEL, NAME = "timed", "autoscale"
MAX_REPLICAS, TARGET_TOKENS_PER_S, DOWN_AFTER_S = 3, 20.0, 10.0
ROWS, VERIFY_MS = (1, 16, 64, 512), (80.0, 90.0, 120.0, 500.0)
LOW, HIGH = 80.0, 480.0  # tokens/s offered
# (share of the time, tokens/s): between them the load changes steadily
SHAPE = ((0.0, LOW), (0.12, LOW), (0.4, HIGH), (0.55, HIGH), (0.75, LOW), (1.0, LOW))
OUTPUT_TOKENS = 48
WINDOW_S = 5.0

Row = dict[str, Any]


def config(table: str) -> AppConfig:
    """One replica has 240 tokens/s at the speed that requests are owed."""
    timed = {"step_tables": [table], "acceptance": [[1.0, 1.0, 0.0]], "concentration": None}
    scaling = {
        "max_replicas": MAX_REPLICAS,
        "target_tokens_per_s": TARGET_TOKENS_PER_S,
        "down_after_s": DOWN_AFTER_S,
        "stats_period_s": 0.5,
    }
    return parse_app_config(
        {
            "model": {"id": MODEL},
            "engine": {"kind": "timed", "timed": timed, "max_running": 8},
            "speculation": {"num_draft_tokens": 3},
            "serving": {"replica_cpus": 0.1, "router": "goodput", "autoscaling": scaling},
        }
    )


def offered(at_s: float, seconds: float) -> float:
    """Tokens per second that clients ask for at a time."""
    shares, rates = zip(*SHAPE, strict=True)
    return float(np.interp(at_s / seconds, shares, rates))


def arrivals(seconds: float, rng: np.random.Generator) -> list[Arrival]:
    """A Poisson process whose rate follows `SHAPE`."""
    found: list[Arrival] = []
    at_s = 0.0
    while (at_s := at_s + float(rng.exponential(OUTPUT_TOKENS / HIGH))) < seconds:
        if rng.random() < offered(at_s, seconds) / HIGH:
            found.append(Arrival(at_s, RawPrompt(len(found), text=f"request {len(found)}"), OUTPUT_TOKENS))
    return found


class Timeline(threading.Thread):
    """Notes once a second what the fleet looks like."""

    def __init__(self, application: Application) -> None:
        super().__init__(daemon=True)
        self._application = application
        self._stopped = threading.Event()
        self.started_s = time.monotonic()
        self.rows: list[Row] = []

    def stop(self) -> list[Row]:
        self._stopped.set()
        self.join()
        return self.rows

    def run(self) -> None:
        while not self._stopped.wait(1.0):
            self.rows.append(self.note())

    def note(self) -> Row:
        stats = self._application.stats().values()
        return {
            "at_s": round(time.monotonic() - self.started_s, 1),
            "wanted": wanted(),
            "ready": sum(one.ready for one in stats),
            "running": sum(one.num_running for one in stats),
            "waiting": sum(one.num_waiting for one in stats),
        }


def wanted() -> int:
    """Replicas that Serve aims at."""
    details = serve.context._get_global_client().get_serve_details()
    return int(details["applications"][NAME]["deployments"]["LLMServer"]["target_num_replicas"])


def windows(sent: list[Arrival], report: LoadReport, seconds: float) -> list[Row]:
    """What clients saw, by the time at which they asked."""
    rows = []
    for begin in np.arange(0.0, seconds, WINDOW_S):
        inside = [
            timing
            for arrival, timing in zip(sent, report.timings, strict=True)
            if begin <= arrival.at_s < begin + WINDOW_S
        ]
        first = [timing.ttft_ms for timing in inside if not timing.error]
        rows.append(
            {
                "at_s": float(begin),
                "offered_tokens_per_s": OUTPUT_TOKENS * len(inside) / WINDOW_S,
                "ttft_p99_ms": round(float(np.percentile(first, 99)), 1) if first else None,
                "errors": len(inside) - len(first),
            }
        )
    return rows


def plot(timeline: list[Row], seen: list[Row], seconds: float, path: Path) -> None:
    """One column of time: load, replicas, queue, first tokens."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(4, 1, figsize=(9, 9), sharex=True, layout="constrained")
    load, replicas, queue, first = axes
    at_s, begins = [row["at_s"] for row in timeline], [row["at_s"] for row in seen]
    load.step(begins, [row["offered_tokens_per_s"] for row in seen], where="post", label="offered")
    load.plot(at_s, [offered(at, seconds) for at in at_s], ":", label="its mean")
    load.set_ylabel("tokens/s")
    replicas.step(at_s, [row["wanted"] for row in timeline], where="post", label="wanted")
    replicas.step(at_s, [row["ready"] for row in timeline], where="post", label="ready")
    replicas.set_ylabel("replicas")
    replicas.set_yticks(range(MAX_REPLICAS + 1))
    queue.step(at_s, [row["waiting"] for row in timeline], where="post", label="waiting")
    queue.step(at_s, [row["running"] for row in timeline], where="post", label="running")
    queue.set_ylabel("requests")
    first.step(begins, [row["ttft_p99_ms"] or 0.0 for row in seen], where="post", label="p99")
    first.set_ylabel("ms to the first token")
    first.set_xlabel("seconds")
    for axis in axes:
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle("Autoscaling on the timed engine (simulated)")
    figure.savefig(path, dpi=110)


def main() -> int:
    """Command line; see the module's docstring. The exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=210.0, help="of arrivals")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="fleet-autoscale", help="of the result files")
    options = parser.parse_args()

    sent = arrivals(options.seconds, np.random.default_rng(options.seed))
    with tempfile.TemporaryDirectory() as folder, local_cluster() as base_url:
        (table,) = save_tables(Path(folder), (1.0,), ROWS, VERIFY_MS)
        with running(base_url, config(table), NAME) as application:
            timeline = Timeline(application)
            timeline.start()
            report = drive_open(application.url, MODEL, sent)
            wait_until(lambda: timeline.rows[-1]["ready"] == 1, 4 * DOWN_AFTER_S)
            rows = timeline.stop()
    seen = windows(sent, report, options.seconds)
    most = max(row["ready"] for row in rows)
    followed = most == MAX_REPLICAS and rows[0]["ready"] == rows[-1]["ready"] == 1
    errors = sum(row["errors"] for row in seen)
    result: Row = {
        **header(),
        "followed": followed,
        "errors": errors,
        "wanted": [rows[0]["wanted"], max(row["wanted"] for row in rows), rows[-1]["wanted"]],
        **report.figures(),
        "timeline": rows,
        "clients": seen,
    }
    path = write_result(options.name, result)
    plot(rows, seen, options.seconds, path.with_suffix(".png"))
    print(
        f"ready 1 → {most} → {rows[-1]['ready']}, {errors} errors, p99 TTFT {report.figures()['ttft_p99_ms']}"
    )
    return 0 if followed and not errors else 1


if __name__ == "__main__":
    sys.exit(main())
