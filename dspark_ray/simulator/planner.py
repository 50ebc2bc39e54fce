"""How many replicas of what, and which policy: from a scenario's traffic, tables and SLO.

First on paper: a replica that always decodes R requests spends, for each request, its share of the decoding
steps and the rows of its prompt,

    s(R) = (E[output − 1] + o) / τ(R) · step(R) / R  +  E[prompt] · (cost of a prompt's row),

so it sustains 1/s(R) requests a second, each at TPOT(R) = R · s(R) / E[output − 1] (Little's law; a prompt's
step emits the first token; o: what an answer's last step emits past its end). The largest R that keeps the
TPOT sizes the fleet. τ(R), o, step(R) and the budget come from running the policies on that load. What one
replica alone carries when requests come by chance is less, and told beside it (`capacity.py`).
Then in traffic: the simulator runs the fleet, which grows until enough requests meet the SLO.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dspark_ray.core.errors import ConfigError
from dspark_ray.core.types import VerificationMode
from dspark_ray.simulator.capacity import LoadPoint, ReplicaCapacity
from dspark_ray.simulator.law import Machine, SteadyLoad, steady_load
from dspark_ray.simulator.policy import SpeculationSettings
from dspark_ray.simulator.run import Setting, prepare, simulate, speculation_settings
from dspark_ray.simulator.scenario import Scenario

OnProgress = Callable[[float, str], None]  # the finished share, and what is done now

_MOST_GROWTHS = 6  # rounds in which a fleet that misses its target grows by a tenth, or by one replica


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to speculate."""

    name: str
    mode: VerificationMode
    fixed_tokens: int | None = None
    fleet_policy: str | None = None  # None: the scenario's


@dataclass(frozen=True, slots=True)
class Point:
    """One replica that always decodes `requests` requests."""

    requests: int
    step_ms: float
    tau: float
    overshoot: float  # tokens that an answer's last step emits past its end
    budget_tokens: float  # draft tokens verified a step
    tokens_per_s: float  # of the replica, decoding alone
    tokens_per_s_per_user: float


@dataclass(frozen=True, slots=True)
class Curve:
    """A candidate on one kind of replica, by load."""

    candidate: Candidate
    kind: int
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one candidate needs on one kind of replica."""

    policy: str
    kind: int
    replicas: int | None  # None: it cannot meet the TPOT even with one request at a time
    requests_per_replica: int  # R at which it was sized
    tpot_ms: float  # foreseen at that load, prefill included
    budget_tokens: float
    tau: float
    requests_per_s_alone: float | None  # that one replica alone carries at the TPOT; None: not even a few
    slo_attainment: float | None  # simulated; None: not simulated
    targets_reached: float | None  # simulated: of the requests that are owed a speed, those that had it
    goodput_tokens_per_s: float | None
    cost_per_hour: float
    cost_per_million_good_tokens: float | None


def candidates(
    num_draft_tokens: int, fixed: Sequence[int] | None = None, fleet_policies: Sequence[str] = ()
) -> list[Candidate]:
    """No speculation, fixed lengths (1 is what MTP-1 does), Algorithm 1 and adaptive, the last one also under
    each of the fleet policies."""
    lengths = sorted({1, (num_draft_tokens + 1) // 2, num_draft_tokens} if fixed is None else set(fixed))
    if any(not 1 <= length <= num_draft_tokens for length in lengths):
        raise ConfigError(f"fixed lengths must be from 1 to num_draft_tokens ({num_draft_tokens})")
    return [
        Candidate("off", VerificationMode.OFF),
        *(Candidate(f"fixed {k}", VerificationMode.FIXED, k) for k in lengths),
        Candidate("algorithm1", VerificationMode.ALGORITHM1),
        Candidate("adaptive", VerificationMode.ADAPTIVE),
        *(
            Candidate(f"adaptive, {policy}", VerificationMode.ADAPTIVE, None, policy)
            for policy in fleet_policies
        ),
    ]


def curve(scenario: Scenario, setting: Setting, candidate: Candidate, kind: int = 0) -> Curve:
    """A replica's throughput, speed and budget by load, from 1 request to what it can run."""
    machine = setting.machines[kind]
    shares = np.array(setting.mix.shares, dtype=np.float64)
    points = []
    for requests in loads(machine.num_slots):
        found = steady_load(
            _settings(setting, candidate),
            machine,
            setting.bank,
            shares,
            np.random.default_rng([scenario.seed, 3, requests]),
            num_decoding=requests,
            context_tokens=requests * setting.context_tokens,
        )
        points.append(_point(requests, found, shares))
    return Curve(candidate, kind, tuple(points))


def loads(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, ... to `most`."""
    sizes = {size for power in range(16) for size in (2**power, 3 * 2**power) if size < most}
    return sorted({*sizes, most})


def plan(
    scenario: Scenario,
    *,
    target: float = 0.95,
    fixed: Sequence[int] | None = None,
    fleet_policies: Sequence[str] = (),
    check: bool = True,
    on_progress: OnProgress | None = None,
) -> tuple[list[Answer], list[Curve]]:
    """Every candidate on every kind of replica, cheapest first, and the curves that they were sized by.

    target: share of the requests that shall meet the SLO. check: size by traffic too, not on paper alone.
    """
    if scenario.arrivals.rate_per_s is None:
        raise ConfigError("a plan needs arrivals with a rate (poisson, bursty or diurnal)")
    under = {policy: scenario.under(policy) for policy in fleet_policies}
    prepared = prepare(scenario)
    curves, answers = [], []
    compared = candidates(scenario.speculation.num_draft_tokens, fixed, fleet_policies)
    pairs = [(kind, candidate) for kind in range(len(prepared.machines)) for candidate in compared]
    for number, (kind, candidate) in enumerate(pairs):

        def tell(share: float, what: str, number: int = number, name: str = candidate.name) -> None:
            if on_progress is not None:
                on_progress((number + share) / len(pairs), f"{name}: {what}")

        tell(0.0, "its load on paper")
        mine, setting = scenario, prepared
        if candidate.fleet_policy is not None:
            mine = under[candidate.fleet_policy]
            setting = replace(prepared, settings=speculation_settings(mine))
        found = curve(mine, setting, candidate, kind)
        curves.append(found)
        answers.append(_answer(mine, setting, found, target, check, tell))
    answers.sort(
        key=lambda a: (a.replicas is None, a.cost_per_hour, a.replicas or 0, -(a.slo_attainment or 0))
    )
    return answers, curves


def capacity(scenario: Scenario, setting: Setting, found: Curve) -> ReplicaCapacity:
    """What one replica of the curve's kind carries of the scenario's traffic, arriving by chance."""
    machine, engine = setting.machines[found.kind], scenario.replicas[found.kind].engine
    points = [
        LoadPoint(point.requests, _service(setting, machine, point)[0], point.step_ms, point.budget_tokens)
        for point in found.points
    ]
    return ReplicaCapacity(points, _mean(setting, "outputs") - 1, engine.max_running, engine.max_waiting)


def _answer(
    scenario: Scenario, setting: Setting, found: Curve, target: float, check: bool, tell: OnProgress
) -> Answer:
    spec = scenario.replicas[found.kind]
    machine = setting.machines[found.kind]
    sized = [(point, *_service(setting, machine, point)) for point in found.points]
    meeting = [item for item in sized if item[2] <= scenario.slo.tpot_ms]
    point, service_s, tpot_ms = meeting[-1] if meeting else sized[0]
    requests = float(point.requests)
    if meeting and len(meeting) < len(sized):  # the load at which the TPOT is met lies before the next point
        above, above_service_s, above_tpot_ms = sized[len(meeting)]
        share = max(0.0, (scenario.slo.tpot_ms - tpot_ms) / (above_tpot_ms - tpot_ms))
        requests += share * (above.requests - requests)
        service_s += share * (above_service_s - service_s)
        tpot_ms += share * (above_tpot_ms - tpot_ms)
    peak = _peak_rate(scenario)
    count = int(np.ceil(peak * service_s))
    attainment = goodput = reached = None
    if meeting and check:
        count, figures = _grown(scenario, found, count, target, tell)
        attainment, goodput = figures["slo_attainment"], figures["goodput_tokens_per_s"]
        reached = _targets_reached(figures["tasks"])
    cost = spec.price_per_hour * count
    alone = capacity(scenario, setting, found).most(scenario.slo.tpot_ms)
    return Answer(
        policy=found.candidate.name,
        kind=found.kind,
        replicas=count if meeting else None,
        requests_per_replica=int(requests),
        tpot_ms=tpot_ms,
        budget_tokens=point.budget_tokens,
        tau=point.tau,
        requests_per_s_alone=None if alone is None else alone.rate_per_s,
        slo_attainment=attainment,
        targets_reached=reached,
        goodput_tokens_per_s=goodput,
        cost_per_hour=cost,
        cost_per_million_good_tokens=cost / 3600 / goodput * 1e6 if goodput else None,
    )


def _service(setting: Setting, machine: Machine, point: Point) -> tuple[float, float]:
    """(seconds of a replica that one request takes, its TPOT in ms) at the load of `point`."""
    prompt, decoded = _mean(setting, "prompts"), max(_mean(setting, "outputs") - 1, 1.0)
    base, rows = (
        round(point.requests + point.budget_tokens),
        max(1, round(min(prompt, machine.max_step_rows))),
    )
    prompt_ms = prompt / rows * machine.times.table.added_prompt_ms(base, rows)
    steps = (decoded + point.overshoot) / point.tau
    service_ms = steps * point.step_ms / point.requests + prompt_ms
    return service_ms / 1e3, point.requests * service_ms / decoded


def _targets_reached(tasks: dict[str, dict[str, Any]]) -> float | None:
    owed = [task for task in tasks.values() if task["reached_target"] is not None and task["answers"]]
    total = sum(task["answers"] for task in owed)
    return sum(task["answers"] * task["reached_target"] for task in owed) / total if total else None


def _grown(
    scenario: Scenario, found: Curve, count: int, target: float, tell: OnProgress
) -> tuple[int, dict[str, Any]]:
    """The fleet size that meets the target in traffic, and what the simulation said of it."""
    figures: dict[str, Any] = {}
    for growth in range(_MOST_GROWTHS + 1):
        fleet = _with_fleet(scenario, found, count)
        figures = simulate(fleet, on_progress=_noting(tell, f"{count} replicas in traffic")).figures
        if figures["slo_attainment"] >= target or growth == _MOST_GROWTHS:
            break
        count = max(count + 1, round(1.1 * count))
    return count, figures


def _noting(tell: OnProgress, note: str) -> Callable[[float], None]:
    return lambda share: tell(share, note)


def _with_fleet(scenario: Scenario, found: Curve, count: int) -> Scenario:
    """The scenario with `count` replicas of the curve's kind and its policy; without faults and scaling."""
    kind = scenario.replicas[found.kind].model_copy(update={"count": count})
    speculation = scenario.speculation.model_copy(
        update={"mode": found.candidate.mode, "fixed_tokens": found.candidate.fixed_tokens}
    )
    return scenario.model_copy(
        update={
            "replicas": [kind],
            "speculation": speculation,
            "faults": (),
            "autoscaling": None,
            "law": "auto" if scenario.steps_together else "load",
        }
    )


def _settings(setting: Setting, candidate: Candidate) -> SpeculationSettings:
    return replace(setting.settings, mode=candidate.mode, fixed_tokens=candidate.fixed_tokens)


def _point(requests: int, found: SteadyLoad, shares: np.ndarray) -> Point:
    tau = float((found.tokens * shares).sum() / shares.sum())
    return Point(
        requests=requests,
        step_ms=found.step_ms,
        tau=tau,
        overshoot=found.overshoot,
        budget_tokens=found.verified,
        tokens_per_s=requests * tau / found.step_ms * 1e3,
        tokens_per_s_per_user=tau / found.step_ms * 1e3,
    )


def _mean(setting: Setting, what: str) -> float:
    shares = np.array(setting.mix.shares)
    means = np.array([lengths.expected for lengths in getattr(setting.mix, what)])
    return float((shares * means).sum() / shares.sum())


def _peak_rate(scenario: Scenario) -> float:
    """Requests per second that a fleet must bear: a day's peak, but not a burst's, which may queue."""
    arrivals = scenario.arrivals
    assert arrivals.rate_per_s is not None
    return arrivals.rate_per_s * (1 + arrivals.swing if arrivals.kind == "diurnal" else 1.0)
