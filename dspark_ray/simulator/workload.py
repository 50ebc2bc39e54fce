"""Who asks for what, and when: Poisson, bursty and diurnal arrivals, a replayed log, or a closed loop.

Requests are handed out in batches up to a time, as arrays: a fleet's hour holds millions.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dspark_ray.core.errors import ArtefactError
from dspark_ray.core.step_record import read_steps
from dspark_ray.core.types import IntArray

RATE_STEP_MS = 1000.0  # a rate that changes is taken as constant for this long


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests by arrival."""

    arrival_ms: NDArray[np.float64]  # [n] ascending
    prompt_tokens: IntArray  # [n] rows of prefill: what a prefix cache has is not among them
    output_tokens: IntArray  # [n]
    task: IntArray  # [n]
    first_ms: NDArray[np.float64] | None = None  # [n] of resumed ones, when they got their first token or NaN
    emitted: IntArray | None = None  # [n] of resumed ones, output tokens so far

    def __len__(self) -> int:
        return len(self.arrival_ms)


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal length in tokens, or one of a list."""

    mean: float  # before it is cut at `most`
    spread: float = 0.5  # standard deviation of its logarithm; 0: always the mean
    most: int = 8192
    values: tuple[int, ...] = ()  # drawn from, instead

    @property
    def expected(self) -> float:
        """Mean of what is drawn."""
        if self.values:
            return float(np.clip(self.values, 1, self.most).mean())
        if self.spread == 0:
            return float(min(self.mean, self.most))
        middle = math.log(self.mean) - self.spread**2 / 2
        place = (math.log(self.most) - middle) / self.spread
        below = NormalDist().cdf
        cut = self.mean * below(place - self.spread) + self.most * (1.0 - below(place))
        return max(cut, 1.0)

    def draw(self, count: int, rng: np.random.Generator) -> IntArray:
        if self.values:
            return np.clip(rng.choice(self.values, size=count), 1, self.most).astype(np.int64)
        middle = np.log(self.mean) - self.spread**2 / 2
        values = np.rint(np.exp(middle + self.spread * rng.standard_normal(count)))
        return np.clip(values, 1, self.most).astype(np.int64)


@dataclass(frozen=True, slots=True)
class TaskMix:
    """What is asked for."""

    shares: tuple[float, ...]  # [tasks] of the requests
    prompts: tuple[Lengths, ...]  # [tasks]
    outputs: tuple[Lengths, ...]  # [tasks]

    def draw(self, arrival_ms: NDArray[np.float64], rng: np.random.Generator) -> Batch:
        count = len(arrival_ms)
        shares = np.array(self.shares) / sum(self.shares)
        task = rng.choice(len(shares), size=count, p=shares).astype(np.int64)
        prompt, output = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        for index in range(len(shares)):
            mine = np.flatnonzero(task == index)
            prompt[mine] = self.prompts[index].draw(len(mine), rng)
            output[mine] = self.outputs[index].draw(len(mine), rng)
        return Batch(arrival_ms, prompt, output, task)


class Rate(Protocol):
    """Requests per second at a time; called once for each `RATE_STEP_MS`, in order."""

    def __call__(self, now_ms: float) -> float: ...


class BurstyRate:
    """Two states: calm at the base rate, bursts at `factor` times it, each of exponential length."""

    def __init__(
        self, base: float, factor: float, calm_s: float, burst_s: float, rng: np.random.Generator
    ) -> None:
        self._rates = (base, base * factor)
        self._lengths_ms = (calm_s * 1e3, burst_s * 1e3)
        self._rng = rng
        self._bursting = 0
        self._until_ms = float(rng.exponential(self._lengths_ms[0]))

    def __call__(self, now_ms: float) -> float:
        while now_ms >= self._until_ms:
            self._bursting = 1 - self._bursting
            self._until_ms += float(self._rng.exponential(self._lengths_ms[self._bursting]))
        return self._rates[self._bursting]


class DiurnalRate:
    """A day in `period_s`: from its lowest at the start to its peak half-way and back."""

    def __init__(self, mean: float, swing: float, period_s: float) -> None:
        assert 0 <= swing <= 1, "the rate is never negative"
        self._mean, self._swing, self._period_ms = mean, swing, period_s * 1e3

    def __call__(self, now_ms: float) -> float:
        return float(self._mean * (1.0 - self._swing * np.cos(2 * np.pi * now_ms / self._period_ms)))


class Workload(Protocol):
    """A source of requests."""

    def take(self, until_ms: float) -> Batch:
        """The arrivals before `until_ms` that have not been taken; time goes forward."""
        ...

    def finished(self, at_ms: NDArray[np.float64]) -> Batch:
        """What clients ask next when answers end at these times; empty for those who do not wait."""
        ...


class OpenWorkload:
    """Clients who do not wait for each other."""

    def __init__(self, rate: Rate, mix: TaskMix, rng: np.random.Generator) -> None:
        self._rate, self._mix, self._rng = rate, mix, rng
        self._made_ms = 0.0
        self._ready = mix.draw(np.zeros(0), rng)

    def take(self, until_ms: float) -> Batch:
        while self._made_ms < until_ms:
            count = self._rng.poisson(self._rate(self._made_ms) * RATE_STEP_MS / 1e3)
            times = self._made_ms + np.sort(self._rng.random(count)) * RATE_STEP_MS
            self._ready = _join(self._ready, self._mix.draw(times, self._rng))
            self._made_ms += RATE_STEP_MS
        self._ready, taken = _split(self._ready, until_ms)
        return taken

    def finished(self, at_ms: NDArray[np.float64]) -> Batch:
        return _head(self._ready, 0)


class ReplayWorkload:
    """Requests of a log."""

    def __init__(self, batch: Batch) -> None:
        self._ready = batch

    def take(self, until_ms: float) -> Batch:
        self._ready, taken = _split(self._ready, until_ms)
        return taken

    def finished(self, at_ms: NDArray[np.float64]) -> Batch:
        return _head(self._ready, 0)


class ClosedWorkload:
    """A fixed number of clients, each of which asks again as soon as it is answered.

    With `requests` they work through a list and stop at its end; without, through the mix for ever.
    """

    def __init__(
        self, clients: int, mix: TaskMix, rng: np.random.Generator, requests: Batch | None = None
    ) -> None:
        self._clients, self._mix, self._rng, self._requests = clients, mix, rng, requests
        self._given = 0
        self._started = False

    def take(self, until_ms: float) -> Batch:
        if self._started:
            return self._mix.draw(np.zeros(0), self._rng)
        self._started = True
        return self._ask(np.zeros(self._clients))

    def finished(self, at_ms: NDArray[np.float64]) -> Batch:
        return self._ask(np.sort(at_ms))

    def _ask(self, at_ms: NDArray[np.float64]) -> Batch:
        if self._requests is None:
            return self._mix.draw(at_ms, self._rng)
        chosen = slice(self._given, min(self._given + len(at_ms), len(self._requests)))
        self._given = chosen.stop
        asked = self._requests
        return Batch(
            at_ms[: chosen.stop - chosen.start],
            asked.prompt_tokens[chosen],
            asked.output_tokens[chosen],
            asked.task[chosen],
        )


def read_arrivals(path: Path, task_names: Sequence[str], speed: float = 1.0) -> Batch:
    """Arrivals of a log: a record of steps, or JSON lines with arrived_ms, prompt_tokens, output_tokens
    and, where there are several tasks, task. The first one comes at 0; `speed` 2 is twice the load.
    """
    rows = _recorded_rows(path) if _is_record(path) else _plain_rows(path, task_names)
    if not rows:
        raise ArtefactError(f"{path} holds no requests")
    table = np.array(sorted(rows))
    return Batch(
        arrival_ms=(table[:, 0] - table[0, 0]) / speed,
        prompt_tokens=np.maximum(table[:, 1], 1).astype(np.int64),
        output_tokens=np.maximum(table[:, 2], 1).astype(np.int64),
        task=table[:, 3].astype(np.int64),
    )


def _is_record(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            return '"format"' in file.readline()
    except (OSError, UnicodeDecodeError) as error:
        raise ArtefactError(f"cannot read {path}: {error}") from error


def _recorded_rows(path: Path) -> list[tuple[float, int, int, int]]:
    return [
        (request.arrived_ms, request.prompt_tokens - request.cached_tokens, request.output_tokens, 0)
        for step in read_steps(path)
        for request in step.ended
    ]


def _plain_rows(path: Path, task_names: Sequence[str]) -> list[tuple[float, int, int, int]]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            data = json.loads(line)
            task = task_names.index(data["task"]) if "task" in data else 0
            rows.append(
                (float(data["arrived_ms"]), int(data["prompt_tokens"]), int(data["output_tokens"]), task)
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ArtefactError(
                f"{path}, line {number}: not a request (arrived_ms, prompt_tokens, output_tokens, task): "
                f"{error}"
            ) from error
    return rows


def _split(batch: Batch, until_ms: float) -> tuple[Batch, Batch]:
    """(those from `until_ms` on, those before it)"""
    count = int(np.searchsorted(batch.arrival_ms, until_ms))
    rest = Batch(
        batch.arrival_ms[count:], batch.prompt_tokens[count:], batch.output_tokens[count:], batch.task[count:]
    )
    return rest, _head(batch, count)


def _head(batch: Batch, count: int) -> Batch:
    return Batch(
        batch.arrival_ms[:count], batch.prompt_tokens[:count], batch.output_tokens[:count], batch.task[:count]
    )


def _join(first: Batch, second: Batch) -> Batch:
    return Batch(
        np.concatenate((first.arrival_ms, second.arrival_ms)),
        np.concatenate((first.prompt_tokens, second.prompt_tokens)),
        np.concatenate((first.output_tokens, second.output_tokens)),
        np.concatenate((first.task, second.task)),
    )
