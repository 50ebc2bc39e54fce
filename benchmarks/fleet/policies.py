"""Fleet policies on timed engines in virtual time: what central planning brings where something couples.

    python benchmarks/fleet/policies.py [--seconds 20] [--name fleet-policies]

Real engines, budgets and plans, with a model that sleeps on a clock that is only counted, so a run takes
seconds and no machine is measured: every figure is simulated, and the same each time. Three questions:

- a shared cap on two unequal replicas: split by `shared_cap` against half each;
- a tier with a speed target on one busy replica: `weighted` against `local`;
- nothing couples: `weighted` with equal tiers against `local`.

Writes benchmarks/results/NAME.json.
"""

import argparse
import json
import shlex
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark_ray.core.clock import ManualClock
from dspark_ray.core.config import AppConfig, SchedulerConfig, parse_app_config
from dspark_ray.core.types import Priority, Request, SamplingParams, ServiceTier, StepPlan
from dspark_ray.engine.timed import TimedEngine, build_timed_engine
from dspark_ray.runtime.fleet_scheduler import FleetScheduler
from dspark_ray.scheduling.step_table import StepTable

PROJECT_DIR = Path(__file__).resolve().parents[2]
RESULTS_DIR = PROJECT_DIR / "benchmarks" / "results"
REPORT_MS = 250.0
WARM_UP_MS = 2000.0

SHALLOW = StepTable(rows=[1, 128], verify_ms=[20.0, 28.0], requests=[1, 64], draft_ms=[1.0, 2.0])
STEEP = StepTable(rows=[1, 128], verify_ms=[30.0, 130.0], requests=[1, 64], draft_ms=[1.0, 2.0])
LIKELY, UNLIKELY = [0.9, 0.88, 0.86], [0.6, 0.5, 0.4]
TARGET_TOKENS_PER_S = 50.0


@dataclass
class Member:
    """One replica that always has `priorities` requests, on a clock of its own."""

    name: str
    engine: TimedEngine
    clock: ManualClock
    priorities: list[Priority]
    sequence: int = 0
    next_report_ms: float = 0.0
    owners: dict[str, int] = field(default_factory=dict)  # request → place in `priorities`
    emitted: list[int] = field(default_factory=list)  # by place, since the warm-up

    def keep_busy(self) -> None:
        """An ended request is followed by another of its kind."""
        for place in set(range(len(self.priorities))) - set(self.owners.values()):
            request_id = f"{self.name}-{place}-{self.engine.stats().num_finished}.1"
            sampling = SamplingParams(max_tokens=400)
            self.engine.add_request(
                Request(request_id, (1, 2, 3, 4), sampling, priority=self.priorities[place])
            )
            self.owners[request_id] = place

    def step(self) -> None:
        self.keep_busy()
        for output in self.engine.step():
            if self.clock.now_ms() > WARM_UP_MS:
                self.emitted[self.owners[output.request_id]] += len(output.token_ids)
            if output.finish_reason is not None:
                del self.owners[output.request_id]


def member(
    name: str, table: StepTable, acceptance: list[float], priorities: list[Priority], folder: Path
) -> Member:
    table.save(folder / f"{name}.json")
    timed = {"step_tables": [str(folder / f"{name}.json")], "acceptance": [acceptance]}
    config: AppConfig = parse_app_config({"engine": {"kind": "timed", "timed": timed}})
    clock = ManualClock()
    engine = build_timed_engine(config, name, clock, lambda seconds: clock.advance(1e3 * seconds))
    return Member(name, engine, clock, priorities, emitted=[0] * len(priorities))


def run(
    members: list[Member], scheduler: SchedulerConfig, seconds: float, *, even: float | None = None
) -> None:
    """All members to the same virtual time. even: each member's fixed share of a cap, instead of plans"""
    clock = ManualClock()
    fleet = FleetScheduler("benchmark", scheduler, clock)
    end_ms = WARM_UP_MS + 1e3 * seconds
    while (slowest := min(members, key=lambda one: one.clock.now_ms())).clock.now_ms() < end_ms:
        slowest.step()
        now_ms = slowest.clock.now_ms()
        if now_ms < slowest.next_report_ms:
            continue
        slowest.next_report_ms = now_ms + REPORT_MS
        slowest.sequence += 1
        clock.advance(max(0.0, now_ms - clock.now_ms()))
        report = slowest.engine.make_report(slowest.name, 1, slowest.sequence, include_table=True)
        plan = fleet.report(report).plan
        if even is not None:
            plan = StepPlan(slowest.name, 1, slowest.sequence, "even", draft_tokens_per_s=even)
        if plan is not None:
            slowest.engine.apply_plan(plan)


def figures(members: list[Member], seconds: float) -> dict[str, Any]:
    """Tokens per second of all, and of a request by tier."""
    speeds: dict[str, list[float]] = {}
    for one in members:
        for priority, emitted in zip(one.priorities, one.emitted, strict=True):
            speeds.setdefault(priority.tier.value, []).append(emitted / seconds)
    counters = [one.engine.counters for one in members]
    return {
        "tokens_per_s": round(sum(sum(one.emitted) for one in members) / seconds, 1),
        "tokens_per_s_of_a_request": {tier: round(sum(v) / len(v), 1) for tier, v in speeds.items()},
        "least_tokens_per_s_of_a_request": {tier: round(min(v), 1) for tier, v in speeds.items()},
        "drafted": sum(one.drafted_tokens for one in counters),
        "verified": sum(one.verified_tokens for one in counters),
        "accepted": sum(one.accepted_tokens for one in counters),
        "trimmed": sum(one.trimmed_tokens for one in counters),
    }


def shared_cap(seconds: float, folder: Path) -> dict[str, Any]:
    """A cap of 40% of what both would verify without one."""

    def members() -> list[Member]:
        normal = [Priority()] * 16
        return [
            member("shallow", SHALLOW, LIKELY, normal, folder),
            member("steep", STEEP, UNLIKELY, normal, folder),
        ]

    free = members()
    run(free, SchedulerConfig(), seconds)
    cap = round(0.4 * sum(one.engine.counters.verified_tokens for one in free) / (seconds + WARM_UP_MS / 1e3))
    planned, halves = members(), members()
    config = SchedulerConfig(policy="shared_cap", cap_draft_tokens_per_s=cap)
    run(planned, config, seconds)
    run(halves, SchedulerConfig(), seconds, even=cap / 2)
    return {
        "cap_draft_tokens_per_s": cap,
        "no_cap": figures(free, seconds),
        "shared_cap": figures(planned, seconds),
        "even_split": figures(halves, seconds),
    }


def speed_target(seconds: float, folder: Path) -> dict[str, Any]:
    """Four requests that are owed a speed, among twenty that are not."""
    priorities = [Priority(ServiceTier.PRIORITY)] * 4 + [Priority()] * 20
    tiers = {"priority": {"weight": 2.0, "target_tokens_per_s": TARGET_TOKENS_PER_S}}
    result: dict[str, Any] = {"target_tokens_per_s": TARGET_TOKENS_PER_S}
    for policy in ("local", "weighted"):
        members = [member("busy", STEEP, [0.85, 0.8, 0.75], priorities, folder)]
        run(members, SchedulerConfig.model_validate({"policy": policy, "tiers": tiers}), seconds)
        result[policy] = figures(members, seconds)
    return result


def nothing_couples(seconds: float, folder: Path) -> dict[str, Any]:
    """Equal tiers, no target, no cap."""
    tiers = {tier.value: {"weight": 1.0} for tier in ServiceTier}
    result = {}
    for policy in ("local", "weighted"):
        members = [member("steep", STEEP, UNLIKELY, [Priority()] * 16, folder)]
        run(members, SchedulerConfig.model_validate({"policy": policy, "tiers": tiers}), seconds)
        result[policy] = figures(members, seconds)
    return result


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of virtual time, after a warm-up")
    parser.add_argument("--name", default="fleet-policies", help="of the result file")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "label": "timed engine, virtual time: simulated figures",
        "command": shlex.join(["python", "benchmarks/fleet/policies.py", *sys.argv[1:]]),
        "seconds": options.seconds,
    }
    with tempfile.TemporaryDirectory() as folder:
        for measure in (shared_cap, speed_target, nothing_couples):
            result[measure.__name__] = measure(options.seconds, Path(folder))
            print(measure.__name__, json.dumps(result[measure.__name__], indent=1))
    path = RESULTS_DIR / f"{options.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path.relative_to(PROJECT_DIR)}")


if __name__ == "__main__":
    main()
