"""From a scenario to figures.

result = simulate(load_scenario(Path("configs/simulation/one-cpu.yaml")))
print(result.figures["tokens_per_s"], result.figures["tpot_ms"]["p50"])
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_ray.core.types import SERVICE_TIERS, FleetView, IntArray, RowClaims, StepPlan, SurvivalReport
from dspark_ray.scheduling.fleet import FLEET_POLICIES
from dspark_ray.scheduling.load import request_counts, throughput_curve
from dspark_ray.scheduling.step_table import StepTable
from dspark_ray.simulator.acceptance import (
    AcceptanceBank,
    AcceptanceModel,
    Blocks,
    modelled_blocks,
    recorded_blocks,
)
from dspark_ray.simulator.fleet import Fleet, Limits
from dspark_ray.simulator.law import ExactLaw, Law, LoadLaw, Machine
from dspark_ray.simulator.policy import SpeculationSettings
from dspark_ray.simulator.routing import ROUTERS, ReplicaFacts
from dspark_ray.simulator.scaling import Presence, Scaling
from dspark_ray.simulator.scenario import LengthSpec, Scenario, TaskSpec
from dspark_ray.simulator.step_times import StepTimes
from dspark_ray.simulator.tally import Tally
from dspark_ray.simulator.workload import (
    Batch,
    BurstyRate,
    ClosedWorkload,
    DiurnalRate,
    Lengths,
    OpenWorkload,
    ReplayWorkload,
    TaskMix,
    Workload,
    read_arrivals,
)

OnProgress = Callable[[float], None]

_INSTANT_MS = 1e-6  # less than any step takes
_PLAN_MS_PER_REPLICA = 10.0  # a round of the shared cap over a large fleet is planned less often


@dataclass(frozen=True, slots=True)
class Result:
    """What came out. `figures` and `timeline` are plain values."""

    figures: dict[str, Any]
    timeline: list[dict[str, float]]


@dataclass(frozen=True, slots=True)
class Setting:
    """A scenario's parts that do not change during a run; the planner uses them without a fleet."""

    settings: SpeculationSettings
    machines: list[Machine]
    kinds: IntArray  # [N] index of each replica's machine
    bank: AcceptanceBank
    mix: TaskMix
    context_tokens: int  # of a request, half-way through its answer


def prepare(
    scenario: Scenario,
    tables: dict[str, StepTable] | None = None,
    times: dict[str, StepTimes] | None = None,
) -> Setting:
    """Reads tables and records. `tables` are used instead of files, by the name in the scenario; so are
    `times`, what steps really take, where that is known (`calibrate.py`)."""
    rng = np.random.default_rng([scenario.seed, 1])
    spec = scenario.speculation
    machines = [
        Machine(
            (tables or {}).get(kind.step_table) or StepTable.load(Path(kind.step_table)),
            kind.engine.max_running,
            kind.engine.max_step_rows,
            (times or {}).get(kind.step_table),
        )
        for kind in scenario.replicas
    ]
    mix = TaskMix(
        shares=tuple(task.share for task in scenario.tasks),
        prompts=tuple(_prompts(task) for task in scenario.tasks),
        outputs=tuple(_lengths(task.output_tokens) for task in scenario.tasks),
    )
    shares = np.array(mix.shares) / sum(mix.shares)
    context = sum(
        share * (_lengths(task.prompt_tokens).expected + output.expected / 2)
        for share, task, output in zip(shares, scenario.tasks, mix.outputs, strict=True)
    )
    return Setting(
        settings=speculation_settings(scenario),
        machines=machines,
        kinds=np.repeat(np.arange(len(machines)), [kind.count for kind in scenario.replicas]),
        bank=AcceptanceBank([_blocks(task, spec.num_draft_tokens, rng) for task in scenario.tasks]),
        mix=mix,
        context_tokens=round(context),
    )


def speculation_settings(scenario: Scenario) -> SpeculationSettings:
    """How a scenario speculates, and what its requests claim."""
    spec, scheduler = scenario.speculation, scenario.scheduler
    plain = SpeculationSettings(
        spec.mode, spec.num_draft_tokens, spec.fixed_tokens, spec.threshold, spec.current_scores
    )
    if scheduler.policy != "weighted":
        return plain
    targets = [task.target_tokens_per_s or 0.0 for task in scenario.tasks]
    claims = RowClaims(
        np.array([SERVICE_TIERS.index(task.tier) for task in scenario.tasks], dtype=np.int64),
        np.array(targets, dtype=np.float32),
    )
    return replace(
        plain, tiers=scheduler.tier_terms(), target_boost=scheduler.target_boost, task_claims=claims
    )


def simulate(
    scenario: Scenario,
    *,
    setting: Setting | None = None,
    requests: Batch | None = None,
    on_progress: OnProgress | None = None,
) -> Result:
    """Runs a scenario; the same seed gives the same figures.

    `requests`: a closed loop works through these and ends with them. `on_progress` is told the finished
    share in [0, 1].
    """
    return _Simulation(scenario, setting or prepare(scenario), requests).run(on_progress)


class _Simulation:
    """One run."""

    def __init__(self, scenario: Scenario, setting: Setting, requests: Batch | None) -> None:
        self._scenario, self._setting, self._bounded = scenario, setting, requests is not None
        workload_rng, law_rng, router_rng = np.random.default_rng([scenario.seed, 2]).spawn(3)
        self._duration_ms = scenario.duration_s * 1e3
        self._tally = Tally(
            len(setting.kinds),
            duration_ms=self._duration_ms,
            from_ms=scenario.warm_up_s * 1e3,
            ttft_ms=scenario.slo.ttft_ms,
            tpot_ms=scenario.slo.tpot_ms,
            targets_per_s=[task.target_tokens_per_s for task in scenario.tasks],
        )
        self._law = _law(scenario, setting, law_rng)
        self._fleet = Fleet(
            _limits(scenario, setting.kinds),
            self._law,
            self._tally,
            max_stride=scenario.max_stride,
            max_tokens=np.array([task.output_tokens.most for task in scenario.tasks], dtype=np.int64),
            steps_together=scenario.steps_together,
        )
        self._router = ROUTERS.get(scenario.router)(router_rng, _facts(setting))
        self._workload = _workload(scenario, setting.mix, workload_rng, requests)
        self._start_up_ms = [kind.start_up_s * 1e3 for kind in scenario.replicas]
        self._events = sorted(((f.at_s * 1e3, f.replica, False) for f in scenario.faults), reverse=True)
        self._plans = _Plans(scenario, setting, self._law, self._fleet)
        self._homeless: list[Batch] = []
        scaling = scenario.autoscaling
        self._scaling = None if scaling is None else Scaling(scaling, self._fleet, _facts(setting))
        self._presence = Presence(len(setting.kinds), scenario.warm_up_s * 1e3)

    def run(self, on_progress: OnProgress | None) -> Result:
        closed = self._scenario.arrivals.kind == "closed"
        now_ms = 0.0
        while now_ms < self._duration_ms:
            self._due_events(now_ms)
            self._scale(now_ms)
            until_ms = now_ms + self._scenario.window_ms
            self._place(self._workload.take(until_ms))
            if closed:  # an answer's end is the next arrival: one step at a time
                until_ms = min(max(now_ms, self._fleet.next_step_ms()) + _INSTANT_MS, until_ms)
            until_ms = min(until_ms, self._duration_ms)
            self._plans.round(now_ms)
            finished = self._fleet.advance(until_ms)
            self._place(self._workload.finished(finished.at_ms))
            self._presence.pay(self._paid(), until_ms)
            now_ms = until_ms
            if self._bounded and not self._fleet.has_work():
                break
            if on_progress is not None:
                on_progress(now_ms / self._duration_ms)
        return self._result()

    def _place(self, batch: Batch) -> None:
        """Arrivals to replicas; while none is ready they wait."""
        waiting = [*self._homeless, batch]
        ready = np.flatnonzero(self._ready())
        self._homeless = []
        for item in waiting:
            if not len(item):
                continue
            if not len(ready):
                self._homeless.append(item)
                continue
            self._fleet.submit(item, self._router.choose(item, self._fleet.load(), ready))

    def _ready(self) -> NDArray[np.bool_]:
        return self._fleet.up if self._scaling is None else self._scaling.ready

    def _paid(self) -> NDArray[np.bool_]:
        """Without autoscaling, a replica that died is paid for until its successor is there."""
        if self._scaling is None:
            return np.ones_like(self._fleet.up)
        return self._fleet.up | self._scaling.starting

    def _scale(self, now_ms: float) -> None:
        scaling = self._scaling
        if scaling is not None:
            orders = scaling.round(now_ms, sum(map(len, self._homeless)))
            for replica in orders.start:
                self._order(int(replica), now_ms)
            scaling.starting[orders.cancel] = False
        self._presence.note(now_ms, self._ready(), self._paid())

    def _order(self, replica: int, now_ms: float) -> None:
        """A replica that will be ready after its kind's start-up time."""
        if self._scaling is not None:
            self._scaling.starting[replica] = True
        ready_ms = now_ms + self._start_up_ms[self._setting.kinds[replica]]
        self._events = [e for e in self._events if e[1:] != (replica, True)]  # an order that was cancelled
        self._events.append((ready_ms, replica, True))
        self._events.sort(reverse=True)

    def _due_events(self, now_ms: float) -> None:
        while self._events and self._events[-1][0] <= now_ms:
            at_ms, replica, starts = self._events.pop()
            if starts:
                self._begin(replica, at_ms)
            elif self._fleet.up[replica]:
                self._homeless.append(self._fleet.fail(replica))
                if self._scaling is None or not self._scaling.draining[replica]:
                    self._order(replica, at_ms)

    def _begin(self, replica: int, at_ms: float) -> None:
        if self._scaling is not None:
            if not self._scaling.starting[replica]:
                return  # cancelled
            self._scaling.starting[replica] = False
        self._fleet.start(replica, at_ms)

    def _result(self) -> Result:
        figures = self._tally.figures(self._law.drafted_tokens())
        names = [task.name for task in self._scenario.tasks]
        figures["tasks"] = dict(zip(names, self._tally.by_task(), strict=True))
        prices = np.array([kind.price_per_hour for kind in self._scenario.replicas])[self._setting.kinds]
        hours = self._presence.paid_ms / 3.6e6
        cost = float((prices * hours).sum())
        good = figures["goodput_tokens_per_s"] * figures["measured_s"]
        figures |= {
            "replicas": self._presence.mean,
            "cost": cost,
            "cost_per_million_good_tokens": cost / good * 1e6 if good else None,
            "law": "exact" if self._law.exact else "load",
            "unanswered": int((self._fleet.num_running + self._fleet.num_waiting).sum()),
        }
        return Result(figures, self._tally.timeline(self._presence.ready_at))


class _Plans:
    """The central scheduler: reports in, plans out, on the simulation's clock."""

    def __init__(self, scenario: Scenario, setting: Setting, law: Law, fleet: Fleet) -> None:
        config = scenario.scheduler
        self._policy = FLEET_POLICIES.get(config.policy)()
        self._cap = config.cap_draft_tokens_per_s
        self._tiers = config.tier_terms() if config.policy == "weighted" else ()
        self._boost = config.target_boost
        self._coupled = config.policy != "local"
        self._setting, self._law, self._fleet = setting, law, fleet
        self._tables: dict[str, StepTable] = {m.table.digest: m.table for m in setting.machines}
        self._every_ms = max(config.report_interval_ms, _PLAN_MS_PER_REPLICA * len(setting.kinds))
        self._next_ms = 0.0
        self._sequence = 0

    def round(self, now_ms: float) -> None:
        """Plans, if it is time to."""
        if not self._coupled or now_ms < self._next_ms:
            return
        self._next_ms = now_ms + self._every_ms
        self._sequence += 1
        replicas = np.flatnonzero(self._fleet.up)
        reports = tuple(self._report(int(replica)) for replica in replicas)
        view = FleetView(reports, dict(self._tables), self._cap, self._tiers, self._boost)
        plans = self._policy.plan(view, self._tables)
        for replica, plan in zip(replicas, plans, strict=True):
            self._apply(int(replica), plan)

    def _apply(self, replica: int, plan: StepPlan) -> None:
        self._law.apply(replica, plan)

    def _report(self, replica: int) -> SurvivalReport:
        slots = self._fleet.decoding_slots(replica)
        survival, known = self._law.survival_report(replica, slots, self._fleet.tasks_of(replica, slots))
        of_tasks, claims = self._setting.settings.task_claims, None
        if of_tasks is not None:
            tasks = self._fleet.tasks_of(replica, known)
            claims = RowClaims(of_tasks.tiers[tasks], of_tasks.targets_per_s[tasks])
        return SurvivalReport(
            replica_id=f"{replica:06d}",
            generation=0,
            sequence=self._sequence,
            survival=survival,
            base_rows=len(slots),
            num_running=int(self._fleet.num_running[replica]),
            num_waiting=int(self._fleet.num_waiting[replica]),
            table_digest=self._setting.machines[self._setting.kinds[replica]].table.digest,
            table=None,
            budget_tokens=float(self._fleet.last_verified[replica]),
            claims=claims,
        )


def _law(scenario: Scenario, setting: Setting, rng: np.random.Generator) -> Law:
    if scenario.exact:
        return ExactLaw(setting.settings, setting.machines, setting.kinds, setting.bank, rng)
    shares = np.array(setting.mix.shares)
    return LoadLaw(
        setting.settings, setting.machines, setting.kinds, setting.bank, shares, setting.context_tokens, rng
    )


def _facts(setting: Setting) -> list[ReplicaFacts]:
    """What a router knows of each replica; survival is the mean over all blocks. [N]"""
    mean = setting.bank.survival.mean(axis=0)
    kinds = []
    for machine in setting.machines:
        counts = request_counts(machine.num_slots)
        rates = throughput_curve(mean, machine.table, None, counts, setting.context_tokens)
        kinds.append(
            ReplicaFacts(machine.num_slots, rates, machine.table.prompt_row_ms(machine.max_step_rows))
        )
    return [kinds[kind] for kind in setting.kinds]


def _limits(scenario: Scenario, kinds: IntArray) -> Limits:
    def of(name: str) -> IntArray:
        return np.array([getattr(kind.engine, name) for kind in scenario.replicas], dtype=np.int64)[kinds]

    return Limits(
        max_running=of("max_running"),
        max_step_rows=of("max_step_rows"),
        max_waiting=of("max_waiting"),
        kv_num_blocks=of("kv_num_blocks"),
        kv_block_size=of("kv_block_size"),
    )


def _workload(scenario: Scenario, mix: TaskMix, rng: np.random.Generator, requests: Batch | None) -> Workload:
    arrivals = scenario.arrivals
    rate = arrivals.rate_per_s or 0.0
    if arrivals.kind == "closed":
        assert arrivals.clients is not None
        return ClosedWorkload(arrivals.clients, mix, rng, requests)
    if arrivals.kind == "replay":
        assert arrivals.log is not None
        names = [task.name for task in scenario.tasks]
        return ReplayWorkload(read_arrivals(Path(arrivals.log), names, arrivals.speed))
    if arrivals.kind == "bursty":
        bursty = BurstyRate(rate, arrivals.burst_factor, arrivals.calm_s, arrivals.burst_s, rng.spawn(1)[0])
        return OpenWorkload(bursty, mix, rng)
    if arrivals.kind == "diurnal":
        return OpenWorkload(DiurnalRate(rate, arrivals.swing, arrivals.period_s), mix, rng)
    return OpenWorkload(lambda now_ms: rate, mix, rng)


def _blocks(task: TaskSpec, num_draft_tokens: int, rng: np.random.Generator) -> Blocks:
    spec = task.acceptance
    if spec.record:
        return recorded_blocks([Path(name) for name in spec.record], num_draft_tokens, rng)
    model = AcceptanceModel(
        conditional=tuple(spec.conditional[:num_draft_tokens]),
        spread=spec.spread,
        persistence=spec.persistence,
        confidence_scale=spec.confidence_scale,
        confidence_bias=spec.confidence_bias,
    )
    return modelled_blocks(model, rng)


def _lengths(spec: LengthSpec, share: float = 1.0) -> Lengths:
    """`share` of the tokens, one at least."""
    values = tuple(max(1, round(share * value)) for value in spec.values)
    return Lengths((spec.mean or 0.0) * share, spec.spread, spec.most, values)


def _prompts(task: TaskSpec) -> Lengths:
    """Rows of prefill: what the prefix cache has is not computed."""
    return _lengths(task.prompt_tokens, 1.0 - task.cached_prompt_share)
