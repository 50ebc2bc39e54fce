"""How long the central scheduler plans: reports of many replicas, no processes, no network.

    python benchmarks/fleet/planning.py [--replicas 250 500 1000 2000] [--requests 256] [--rounds 5]
        [--groups 10 100] [--name fleet-planning]

Every round takes one new report of each replica, works out its curve (once a report), and plans all of them
once. Of groups of 1,000 replicas: the curve of one, and the split of the cap over them. Times are of the
processor, one thread. Writes benchmarks/results/NAME.json.
"""

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from dspark_ray.core.clock import SystemClock
from dspark_ray.core.config import SchedulerConfig
from dspark_ray.core.types import FleetView, StepPlan, SurvivalReport
from dspark_ray.runtime.fleet_scheduler import FleetScheduler
from dspark_ray.scheduling.fleet import FLEET_POLICIES
from dspark_ray.scheduling.groups import split_over_groups
from dspark_ray.scheduling.step_table import StepTable

PROJECT_DIR = Path(__file__).resolve().parents[2]
RESULTS_DIR = PROJECT_DIR / "benchmarks" / "results"
GAMMA = 7
TABLES = [
    StepTable(
        rows=[1, 64, 256, 2304],
        verify_ms=[a, a * 1.1, a * 1.6, a * 8],
        requests=[1, 256],
        draft_ms=[1.0, 3.0],
    )
    for a in (15.0, 20.0, 30.0, 45.0)
]


def reports(num_replicas: int, num_requests: int, sequence: int) -> list[SurvivalReport]:
    """Replicas of four kinds, with confidences of their own."""
    rng = np.random.default_rng(sequence)
    survival = np.cumprod(rng.random((num_requests, GAMMA), dtype=np.float32) ** 0.3, axis=1)
    found = []
    for number in range(num_replicas):
        table = TABLES[number % len(TABLES)]
        scores = survival * np.float32(0.7 + 0.3 * rng.random())
        found.append(
            SurvivalReport(
                f"replica-{number:05}", 1, sequence, scores, num_requests, num_requests, 0, table.digest,
                table.to_dict() if sequence == 1 else None, 0.0,
            )
        )  # fmt: skip
    return found


def measure(num_replicas: int, num_requests: int, rounds: int) -> dict[str, Any]:
    """Medians over the rounds, in milliseconds of processor time."""
    cap = 2000.0 * num_replicas
    scheduler = FleetScheduler(
        "benchmark", SchedulerConfig(policy="shared_cap", cap_draft_tokens_per_s=cap), SystemClock()
    )
    scheduler.plans = _no_plans  # type: ignore[method-assign]
    policy, tables = FLEET_POLICIES.get("shared_cap")(), {table.digest: table for table in TABLES}
    ingest_ms, curves_ms, plan_ms = [], [], []
    for sequence in range(1, rounds + 1):
        arriving = reports(num_replicas, num_requests, sequence)
        started = time.process_time()
        for report in arriving:
            scheduler.report(report)
        ingest_ms.append(1e3 * (time.process_time() - started))
        view = FleetView(tuple(arriving), dict(tables), cap)
        started = time.process_time()
        policy.plan(view, tables)  # works out the curve of each new report
        both_ms = 1e3 * (time.process_time() - started)
        started = time.process_time()
        policy.plan(view, tables)
        plan_ms.append(1e3 * (time.process_time() - started))
        curves_ms.append(both_ms - plan_ms[-1])
    return {
        "replicas": num_replicas,
        "requests": num_requests,
        "ingest_ms_per_report": round(float(np.median(ingest_ms)) / num_replicas, 4),
        "curve_ms_per_report": round(float(np.median(curves_ms)) / num_replicas, 4),
        "plan_ms": round(float(np.median(plan_ms)), 2),
    }


def measure_groups(num_groups: int, num_requests: int, rounds: int) -> dict[str, Any]:
    """The outer split, 1,000 replicas a group; medians over the rounds, in ms of processor time."""
    policy, tables = FLEET_POLICIES.get("shared_cap")(), {table.digest: table for table in TABLES}
    view = FleetView(tuple(reports(1000, num_requests, 1)), dict(tables), 2e6)
    policy.plan(view, tables)  # the curves of single replicas are worked out once a report
    curve_ms, split_ms = [], []
    for _ in range(rounds):
        started = time.process_time()
        demand = policy.demand(view, tables)
        curve_ms.append(1e3 * (time.process_time() - started))
        assert demand is not None
        started = time.process_time()
        split_over_groups(dict.fromkeys(range(num_groups), demand), 2e6 * num_groups, num_groups)
        split_ms.append(1e3 * (time.process_time() - started))
    return {
        "groups": num_groups,
        "replicas": 1000 * num_groups,
        "group_curve_ms": round(float(np.median(curve_ms)), 2),
        "split_ms": round(float(np.median(split_ms)), 2),
    }


def _no_plans() -> tuple[StepPlan, ...]:
    return ()


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[250, 500, 1000, 2000])
    parser.add_argument("--groups", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="fleet-planning", help="of the result file")
    options = parser.parse_args()
    rows = [measure(count, options.requests, options.rounds) for count in options.replicas]
    groups = [measure_groups(count, options.requests, options.rounds) for count in options.groups]
    for row in (*rows, *groups):
        print(json.dumps(row))
    result = {
        "command": shlex.join(["python", "benchmarks/fleet/planning.py", *sys.argv[1:]]),
        "gamma": GAMMA,
        "rows": rows,
        "groups": groups,
    }
    path = RESULTS_DIR / f"{options.name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path.relative_to(PROJECT_DIR)}")


if __name__ == "__main__":
    main()
