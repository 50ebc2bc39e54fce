"""The central scheduler and a fleet of senders: ingest, planning and fan-out over the real transport.

    python benchmarks/fleet/senders.py [--replicas 250 500 1000 2000] [--requests 256] [--seconds 20]
        [--groups 1] [--name fleet-senders]

The scheduler actor is the application's own. A sender is a replica without an engine: it reports by Ray calls
as often as the scheduler lets it, full survival scores each time, and has an address of its own for plans.
Senders live in a few processes, each with one event loop, on this machine, and take part of its cores: on a
cluster they would not. The age of a plan is the time since it arrived, as an engine counts it, sampled over
all senders; `push_ms` is the scheduler's time for planning and sending to all, where it pushes at all.
Writes benchmarks/results/NAME.json.
"""

import argparse
import asyncio
import json
import os
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import zmq
import zmq.asyncio
from planning import GAMMA, PROJECT_DIR, RESULTS_DIR, reports

from dspark_ray.core.config import SchedulerConfig
from dspark_ray.core.types import SurvivalReport
from dspark_ray.runtime.messages import ApplyPlan, decode
from dspark_ray.runtime.names import NAMESPACE, engine_name
from dspark_ray.runtime.scheduler_actor import find_or_start_scheduler
from dspark_ray.scheduling.groups import group_of

APP = "senders"
SAMPLE_S = 0.05
WARM_UP_S = 5.0


class Senders:
    """Replicas `first` to `first + count` of the fleet, in one event loop."""

    def __init__(self, config: SchedulerConfig, first: int, count: int, num_requests: int) -> None:
        self._config = config
        self._reports = reports(first + count, num_requests, 1)[first:]
        self._arrived: dict[str, float] = {}
        self._num_reports = 0
        self._latencies_ms: list[float] = []
        self._plans = zmq.asyncio.Context().socket(zmq.PULL)
        self._plans.setsockopt(zmq.RCVHWM, 100_000)

    async def run(self, seconds: float) -> dict[str, Any]:
        """Reports for so long after a warm-up; ages of plans in ms, sampled, and how much was said."""
        num_groups = self._config.num_groups
        schedulers = [find_or_start_scheduler(APP, self._config, group) for group in range(num_groups)]
        await asyncio.gather(*(scheduler.configure.remote(self._config) for scheduler in schedulers))
        tasks = []
        for report in self._reports:
            scheduler = schedulers[group_of(report.replica_id, num_groups)]
            tasks.append(asyncio.create_task(self._send(scheduler, report)))
        tasks.append(asyncio.create_task(self._receive()))
        await asyncio.sleep(WARM_UP_S)
        self._num_reports, self._latencies_ms = 0, []
        ages: list[np.ndarray] = []
        started, cpu = time.monotonic(), time.process_time()
        while time.monotonic() - started < seconds:
            await asyncio.sleep(SAMPLE_S)
            now = time.monotonic()
            ages.append(1e3 * (now - np.array(list(self._arrived.values()))))
        for task in tasks:
            task.cancel()
        return {
            "ages_ms": np.concatenate(ages),
            "without_plan": len(self._reports) - len(self._arrived),
            "reports": self._num_reports,
            "latencies_ms": np.array(self._latencies_ms),
            "cpu_s": time.process_time() - cpu,
            "seconds": time.monotonic() - started,
        }

    async def _send(self, scheduler: Any, report: SurvivalReport) -> None:
        """One replica: a report, its answer, the pause it was told."""
        port = self._plans.bind_to_random_port("tcp://127.0.0.1")
        report = replace(report, plan_address=f"tcp://127.0.0.1:{port}")
        table, knows_table, interval_ms = report.table, False, self._config.report_interval_ms
        await asyncio.sleep(np.random.random() * WARM_UP_S / 2)  # replicas do not report in step
        while True:
            due = time.monotonic() + interval_ms / 1e3
            sent = time.monotonic()
            reply = await scheduler.report.remote(replace(report, table=None if knows_table else table))
            self._latencies_ms.append(1e3 * (time.monotonic() - sent))
            self._num_reports += 1
            knows_table = reply.knows_table
            interval_ms = max(self._config.report_interval_ms, reply.interval_ms)
            if reply.plan is not None:
                self._arrived[report.replica_id] = time.monotonic()
            report = replace(report, sequence=report.sequence + 1)
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _receive(self) -> None:
        while True:
            message = decode(await self._plans.recv())
            assert isinstance(message, ApplyPlan)
            self._arrived[message.plan.replica_id] = time.monotonic()


def measure(
    num_replicas: int, num_requests: int, seconds: float, num_processes: int, num_groups: int
) -> dict[str, Any]:
    """One fleet; its schedulers are started anew for it."""
    cap = 2000.0 * num_replicas
    config = SchedulerConfig(policy="shared_cap", cap_draft_tokens_per_s=cap, num_groups=num_groups)
    schedulers = [find_or_start_scheduler(APP, config, group) for group in range(num_groups)]
    pids = ray.get([scheduler.pid.remote() for scheduler in schedulers])
    actor_class: Any = ray.remote(Senders)
    share = -(-num_replicas // num_processes)
    senders = [
        # The scheduler ends without an engine of its application: these are called like some.
        actor_class.options(name=engine_name(APP, str(first)), namespace=NAMESPACE, num_cpus=0).remote(
            config, first, min(share, num_replicas - first), num_requests
        )
        for first in range(0, num_replicas, share)
    ]
    runs = [sender.run.remote(seconds) for sender in senders]
    time.sleep(WARM_UP_S + 1.0)
    before, cpu_before = _pushes(schedulers), sum(map(_cpu_s, pids))
    time.sleep(seconds - 2.0)
    after, cpu_s = _pushes(schedulers), sum(map(_cpu_s, pids)) - cpu_before
    num_pushes = after[0] - before[0]
    found = ray.get(runs)
    for sender in senders:
        ray.kill(sender)
    for scheduler in schedulers:
        ray.kill(scheduler, no_restart=True)
    ages = np.concatenate([one["ages_ms"] for one in found])
    latencies = np.concatenate([one["latencies_ms"] for one in found])
    return {
        "replicas": num_replicas,
        "requests": num_requests,
        "groups": num_groups,
        "plan_age_p50_ms": round(float(np.percentile(ages, 50)), 1),
        "plan_age_p99_ms": round(float(np.percentile(ages, 99)), 1),
        "plan_age_max_ms": round(float(ages.max()), 1),
        "without_plan": sum(one["without_plan"] for one in found),
        "reports_per_s": round(sum(one["reports"] / one["seconds"] for one in found), 1),
        "report_p50_ms": round(float(np.percentile(latencies, 50)), 1),
        "report_p99_ms": round(float(np.percentile(latencies, 99)), 1),
        "pushes_per_s": round(num_pushes / (seconds - 2.0), 2),
        "push_ms": round((after[1] - before[1]) / num_pushes, 1) if num_pushes else None,
        "scheduler_cores": round(cpu_s / (seconds - 2.0), 2),
        "senders_cores": round(sum(one["cpu_s"] / one["seconds"] for one in found), 2),
    }


def _pushes(schedulers: list[Any]) -> tuple[int, float]:
    """How many rounds of plans were sent to all, and how long they took together."""
    states = ray.get([scheduler.state.remote() for scheduler in schedulers])
    rounds = sum(state["pushes"]["rounds"] for state in states)
    return rounds, sum(state["pushes"]["total_ms"] for state in states)


def _cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[250, 500, 1000, 2000])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--groups", type=int, default=1, help="schedulers")
    parser.add_argument("--processes", type=int, default=2, help="that the senders live in")
    parser.add_argument("--name", default="fleet-senders", help="of the result file")
    options = parser.parse_args()
    places = (PROJECT_DIR, PROJECT_DIR / "kernels", PROJECT_DIR / "benchmarks" / "fleet")
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, places))
    ray.init("local", num_cpus=4, include_dashboard=False, object_store_memory=200 << 20, namespace=NAMESPACE)
    rows = []
    for count in options.replicas:
        rows.append(measure(count, options.requests, options.seconds, options.processes, options.groups))
        print(json.dumps(rows[-1]), flush=True)
        time.sleep(1.0)
    ray.shutdown()
    result = {
        "command": shlex.join(["python", "benchmarks/fleet/senders.py", *sys.argv[1:]]),
        "gamma": GAMMA,
        "cores": os.cpu_count(),
        "rows": rows,
    }
    path = RESULTS_DIR / f"{options.name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path.relative_to(PROJECT_DIR)}")


if __name__ == "__main__":
    main()
