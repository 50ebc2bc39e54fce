"""What a step of a replica emits and costs: step by step, or looked up by load.

`ExactLaw` runs the policies for every step of every replica. `LoadLaw` runs them once for each load that
occurs (decoding requests, prefill rows, share of the cap) until that load is steady, and then looks up. It
is the shortcut that makes a fleet's hour a matter of minutes; what it leaves out is how budgets move while
the load changes, and that one replica's requests happen to be easier than another's.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dspark_ray.core.types import FloatArray, IntArray, StepPlan
from dspark_ray.scheduling.live_costs import StepSize
from dspark_ray.scheduling.speculation import Load
from dspark_ray.scheduling.step_table import StepTable
from dspark_ray.simulator.acceptance import AcceptanceBank
from dspark_ray.simulator.policy import ReplicaPolicy, SpeculationSettings
from dspark_ray.simulator.step_times import StepTimes

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Machine:
    """One kind of replica, as the laws see it."""

    table: StepTable  # that its policies go by
    num_slots: int  # engine.max_running
    max_step_rows: int
    measured: StepTimes | None = None  # what steps take, where more is known than the table

    @property
    def times(self) -> StepTimes:
        return self.measured or StepTimes(self.table)


@dataclass(frozen=True, slots=True)
class Steps:
    """What replicas are about to run: n replicas, S slots each."""

    replicas: IntArray  # [n]
    decoding: NDArray[np.bool_]  # [n, S]
    remaining: IntArray  # [n, S] tokens that each may still emit, whatever the end of its answer
    prefill_rows: IntArray  # [n]
    context_tokens: IntArray  # [n] that the decoding requests attend to, anchors included
    num_steps: IntArray  # [n] steps of each; 1 under ExactLaw
    now_ms: Floats  # [n]


@dataclass(frozen=True, slots=True)
class Emitted:
    """What they emit."""

    tokens: IntArray  # [n, S] of all steps together, ends of answers not regarded
    verified: Floats  # [n] draft tokens a step


@dataclass(frozen=True, slots=True)
class Next:
    """What follows the steps of `Steps`, as far as it is known at their end."""

    decoding: NDArray[np.bool_]  # [n, S]
    remaining: IntArray  # [n, S]
    prefill_rows: IntArray  # [n]
    context_tokens: IntArray  # [n]


class Law(Protocol):
    """Owned by the fleet. `verify`, then `finish` with what comes next, for every sweep."""

    exact: bool  # one step at a time

    def start(self, replicas: IntArray, slots: IntArray, tasks: IntArray) -> None:
        """New or resumed requests, at most one a replica. All [n]."""
        ...

    def verify(self, steps: Steps) -> Emitted: ...

    def finish(self, steps: Steps, alive: Floats, following: Next) -> Floats:
        """Milliseconds of one step of each replica, drafting for the next one included. → [n]

        alive [n]: decoding requests, mean over the steps.
        """
        ...

    def apply(self, replica: int, plan: StepPlan) -> None: ...

    def survival_report(
        self, replica: int, decoding: IntArray, tasks: IntArray
    ) -> tuple[FloatArray, IntArray]:
        """Scores of the decoding slots, as the engine reports them, and whose. → [≤ R, γ], [≤ R]"""
        ...

    def drafted_tokens(self) -> float: ...


class ExactLaw:
    """The policies at every step."""

    exact = True

    def __init__(
        self,
        settings: SpeculationSettings,
        machines: list[Machine],
        kinds: IntArray,
        bank: AcceptanceBank,
        rng: np.random.Generator,
    ) -> None:
        """kinds [N]: index of each replica's machine."""
        self._machines, self._kinds = machines, kinds
        self._policies = [_policy(settings, machines[kind], bank, child)
                          for kind, child in zip(kinds, rng.spawn(len(kinds)), strict=True)]  # fmt: skip
        self._verified: Floats = np.zeros(len(kinds))

    def start(self, replicas: IntArray, slots: IntArray, tasks: IntArray) -> None:
        for replica, slot, task in zip(replicas, slots, tasks, strict=True):
            self._policies[replica].start(np.array([slot]), np.array([task]))

    def verify(self, steps: Steps) -> Emitted:
        tokens = np.zeros(steps.decoding.shape, dtype=np.int64)
        verified = np.zeros(len(steps.replicas))
        for row, replica in enumerate(steps.replicas):
            slots = np.flatnonzero(steps.decoding[row])
            load = Load(int(steps.prefill_rows[row]), int(steps.context_tokens[row]))
            outcome = self._policies[replica].verify(
                slots, steps.remaining[row, slots], load, float(steps.now_ms[row])
            )
            tokens[row, slots] = outcome.accepted + 1
            verified[row] = outcome.lens.sum()
        self._verified = verified
        return Emitted(tokens, verified)

    def finish(self, steps: Steps, alive: Floats, following: Next) -> Floats:
        cost_ms = np.zeros(len(steps.replicas))
        for row, replica in enumerate(steps.replicas):
            verified = int(self._verified[row])
            step = StepSize(
                decode_rows=int(alive[row]) + verified,
                draft_rows=verified,
                prompt_rows=int(steps.prefill_rows[row]),
                context_tokens=int(steps.context_tokens[row]) + verified,
            )
            slots = np.flatnonzero(following.decoding[row])
            load = Load(int(following.prefill_rows[row]), int(following.context_tokens[row]))
            ended = self._policies[replica].finish(step, slots, following.remaining[row, slots], load)
            cost_ms[row] = ended.total_ms
        return cost_ms

    def apply(self, replica: int, plan: StepPlan) -> None:
        self._policies[replica].apply(plan)

    def survival_report(
        self, replica: int, decoding: IntArray, tasks: IntArray
    ) -> tuple[FloatArray, IntArray]:
        return self._policies[replica].survival_report(decoding)

    def drafted_tokens(self) -> float:
        return float(sum(policy.drafted_tokens for policy in self._policies))


@dataclass(frozen=True, slots=True)
class SteadyLoad:
    """A load's mean step, found by running the policies on it."""

    step_ms: float  # drafting included, at `context_tokens`
    verified: float  # draft tokens a step
    drafted: float  # tokens drafted a step
    tokens: Floats  # [tasks] a request and step
    overshoot: float  # tokens that an answer's last step emits past its end, in the mean


def steady_load(
    settings: SpeculationSettings,
    machine: Machine,
    bank: AcceptanceBank,
    shares: Floats,
    rng: np.random.Generator,
    *,
    num_decoding: int,
    prefill_rows: int = 0,
    context_tokens: int = 0,
    draft_tokens_per_s: float | None = None,
    warm_steps: int = 32,
    num_steps: int = 64,
) -> SteadyLoad:
    """Runs the policies on a load that stays as it is. With prefill, every fourth step holds some, and those
    are measured; shares [tasks] of the requests.
    """
    policy = _policy(settings, machine, bank, rng)
    slots = np.arange(num_decoding)
    tasks = rng.choice(bank.num_tasks, size=num_decoding, p=shares / shares.sum()).astype(np.int64)
    policy.start(slots, tasks)
    if draft_tokens_per_s is not None:
        terms = settings.tiers, settings.target_boost
        policy.apply(StepPlan("", 0, 0, "", draft_tokens_per_s, tiers=terms[0], target_boost=terms[1]))
    plenty = np.full(num_decoding, 1 << 30, dtype=np.int64)
    quiet, busy = Load(0, context_tokens), Load(prefill_rows, context_tokens)
    emitted, counted = np.zeros(bank.num_tasks), np.zeros(bank.num_tasks)
    total_ms = verified = drafted_before = now_ms = measured = squares = 0.0
    for number in range(warm_steps + num_steps):
        if number == warm_steps:
            drafted_before = float(policy.drafted_tokens)
        load = busy if prefill_rows and number % 4 == 3 else quiet
        following = busy if prefill_rows and number % 4 == 2 else quiet
        outcome = policy.verify(slots, plenty, load, now_ms)
        budget = int(outcome.lens.sum())
        step = StepSize(num_decoding + budget, budget, load.prefill_rows, context_tokens + budget)
        step_ms = policy.finish(step, slots, plenty, following).total_ms
        now_ms += step_ms
        if number >= warm_steps and load is (busy if prefill_rows else quiet):
            measured += 1
            total_ms += step_ms
            verified += budget
            squares += float(((outcome.accepted + 1) ** 2).sum())
            emitted += np.bincount(tasks, weights=outcome.accepted + 1, minlength=bank.num_tasks)
            counted += np.bincount(tasks, minlength=bank.num_tasks)
    mean = emitted.sum() / max(counted.sum(), 1.0)
    return SteadyLoad(
        step_ms=total_ms / measured,
        verified=verified / measured,
        drafted=(policy.drafted_tokens - drafted_before) / num_steps,
        tokens=np.where(counted > 0, emitted / np.maximum(counted, 1.0), mean),
        # An end is somewhere in the tokens of its step, and the more likely in a step the more it emits.
        overshoot=float((squares / max(emitted.sum(), 1.0) - 1.0) / 2.0),
    )


class LoadLaw:
    """Steady loads on a grid, found when first needed, and linear between them."""

    exact = False

    _CAP_STEP = 1.25  # ratio of neighbouring caps that count as different

    def __init__(
        self,
        settings: SpeculationSettings,
        machines: list[Machine],
        kinds: IntArray,
        bank: AcceptanceBank,
        shares: Floats,
        context_tokens: int,
        rng: np.random.Generator,
    ) -> None:
        """context_tokens: of a request, typically; budgets are searched at it."""
        self._settings, self._machines, self._kinds, self._bank = settings, machines, kinds, bank
        self._shares, self._context, self._rng = shares, context_tokens, rng
        self._surfaces: dict[tuple[int, int | None], _Surface] = {}
        self._caps: list[int | None] = [None] * len(kinds)
        self._capped = False
        self._task = np.zeros((len(kinds), max(m.num_slots for m in machines)), dtype=np.int64)
        self._drafted = 0.0

    def start(self, replicas: IntArray, slots: IntArray, tasks: IntArray) -> None:
        self._task[replicas, slots] = tasks

    def verify(self, steps: Steps) -> Emitted:
        count = steps.decoding.sum(axis=1)
        tokens = np.zeros(steps.decoding.shape, dtype=np.int64)
        verified = np.zeros(len(steps.replicas))
        for surface, rows in self._by_surface(steps.replicas):
            found = surface.at(count[rows].astype(float), steps.prefill_rows[rows].astype(float))
            verified[rows] = found[:, _VERIFIED]
            self._drafted += float((found[:, _DRAFTED] * steps.num_steps[rows]).sum())
            where, slots = np.nonzero(steps.decoding[rows])
            mine = rows[where]
            tasks = self._task[steps.replicas[mine], slots]
            extra = np.maximum(found[where, _TOKENS + tasks] - 1.0, 0.0)
            gamma = self._settings.num_draft_tokens
            drawn = self._rng.binomial(steps.num_steps[mine] * gamma, np.minimum(extra / gamma, 1.0))
            tokens[mine, slots] = steps.num_steps[mine] + drawn
        return Emitted(tokens, verified)

    def finish(self, steps: Steps, alive: Floats, following: Next) -> Floats:
        cost_ms = np.zeros(len(steps.replicas))
        for surface, rows in self._by_surface(steps.replicas):
            found = surface.at(alive[rows], steps.prefill_rows[rows].astype(float))
            more_rows = found[:, _VERIFIED] / np.maximum(alive[rows], 1.0)
            slopes = surface.machine.times.table.context_cost_ms(1.0, more_rows)
            context = slopes * (steps.context_tokens[rows] - alive[rows] * self._context)
            cost_ms[rows] = np.maximum(found[:, _STEP_MS] + context, 1e-3)
        return cost_ms

    def apply(self, replica: int, plan: StepPlan) -> None:
        rate = plan.draft_tokens_per_s
        self._capped |= rate is not None
        self._caps[replica] = (
            None if rate is None else round(float(np.log(max(rate, 1.0)) / np.log(self._CAP_STEP)))
        )

    def survival_report(
        self, replica: int, decoding: IntArray, tasks: IntArray
    ) -> tuple[FloatArray, IntArray]:
        return np.asarray(self._bank.survival[self._bank.start(tasks, self._rng)]), decoding

    def drafted_tokens(self) -> float:
        return self._drafted

    def _by_surface(self, replicas: IntArray) -> "list[tuple[_Surface, IntArray]]":
        """Rows of `replicas` by kind of machine and cap."""
        if len(self._machines) == 1 and not self._capped:
            return [(self._surface(0, None), np.arange(len(replicas)))]
        groups: dict[tuple[int, int | None], list[int]] = {}
        for row, replica in enumerate(replicas):
            groups.setdefault((int(self._kinds[replica]), self._caps[replica]), []).append(row)
        return [(self._surface(*key), np.array(rows)) for key, rows in groups.items()]

    def _surface(self, kind: int, cap: int | None) -> "_Surface":
        if (kind, cap) not in self._surfaces:
            rate = None if cap is None else self._CAP_STEP**cap
            self._surfaces[kind, cap] = _Surface(
                self._settings, self._machines[kind], self._bank, self._shares, self._context, rate, self._rng
            )
        return self._surfaces[kind, cap]


_STEP_MS, _VERIFIED, _DRAFTED, _TOKENS = 0, 1, 2, 3  # columns of a surface


class _Surface:
    """One machine's steady loads by decoding requests and prefill rows."""

    def __init__(
        self,
        settings: SpeculationSettings,
        machine: Machine,
        bank: AcceptanceBank,
        shares: Floats,
        context_tokens: int,
        draft_tokens_per_s: float | None,
        rng: np.random.Generator,
    ) -> None:
        self.machine = machine
        self._settings, self._bank, self._shares = settings, bank, shares
        self._context, self._rate, self._rng = context_tokens, draft_tokens_per_s, rng
        self._decoding = _grid(machine.num_slots)
        self._prefill = np.array(sorted({0, 16, 64, 192, machine.max_step_rows // 2, machine.max_step_rows}))
        shape = (len(self._decoding), len(self._prefill), _TOKENS + bank.num_tasks)
        self._values = np.zeros(shape)
        self._known = np.zeros(shape[:2], dtype=bool)

    def at(self, decoding: Floats, prefill_rows: Floats) -> Floats:
        """Bilinear. decoding, prefill_rows [n] → [n, columns]"""
        low_d, share_d = _place(self._decoding, decoding)
        low_p, share_p = _place(self._prefill, prefill_rows)
        result = np.zeros((len(decoding), self._values.shape[2]))
        for step_d, weight_d in ((0, 1.0 - share_d), (1, share_d)):
            for step_p, weight_p in ((0, 1.0 - share_p), (1, share_p)):
                weight = weight_d * weight_p
                used = weight > 0
                if used.any():
                    d, p = low_d[used] + step_d, low_p[used] + step_p
                    self._find(d, p)
                    result[used] += weight[used, None] * self._values[d, p]
        return result

    def _find(self, d: IntArray, p: IntArray) -> None:
        missing = ~self._known[d, p]
        if not missing.any():
            return
        for i, j in {(int(a), int(b)) for a, b in zip(d[missing], p[missing], strict=True)}:
            self._values[i, j] = self._measure(int(self._decoding[i]), int(self._prefill[j]))
            self._known[i, j] = True

    def _measure(self, decoding: int, prefill_rows: int) -> Floats:
        prefill_rows = min(prefill_rows, max(0, self.machine.max_step_rows - decoding))
        if decoding == 0:
            times = self.machine.times
            step_ms = times.step_ms(StepSize(0, prompt_rows=max(prefill_rows, 1))) + times.pause_ms(0)
            return np.array([step_ms, 0.0, 0.0, *np.ones(self._bank.num_tasks)])
        found = steady_load(
            self._settings, self.machine, self._bank, self._shares, self._rng,
            num_decoding=decoding, prefill_rows=prefill_rows, context_tokens=decoding * self._context,
            draft_tokens_per_s=self._rate,
        )  # fmt: skip
        return np.array([found.step_ms, found.verified, found.drafted, *found.tokens])


def _grid(most: int) -> IntArray:
    """0, every count to 8, then ever wider steps, to `most`."""
    points = {*range(min(8, most) + 1), most}
    value = 8.0
    while value < most:
        points.add(round(value))
        value *= 1.2
    return np.array(sorted(points), dtype=np.int64)


def _place(grid: IntArray, wanted: Floats) -> tuple[IntArray, Floats]:
    """(index of the grid point below, share of the way to the next one). [n] → [n], [n]"""
    inside = np.clip(wanted, grid[0], grid[-1])
    low = np.clip(np.searchsorted(grid, inside, side="right") - 1, 0, len(grid) - 2)
    share = (inside - grid[low]) / (grid[low + 1] - grid[low])
    return low.astype(np.int64), np.asarray(share, dtype=np.float64)


def _policy(
    settings: SpeculationSettings, machine: Machine, bank: AcceptanceBank, rng: np.random.Generator
) -> ReplicaPolicy:
    return ReplicaPolicy(
        settings,
        machine.table,
        bank,
        num_slots=machine.num_slots,
        max_step_rows=machine.max_step_rows,
        rng=rng,
        times=machine.times,
    )
