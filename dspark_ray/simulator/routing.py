"""Which replica takes a request: what a router knows is each replica's load at the start of the window."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dspark_ray.core.registry import Registry
from dspark_ray.core.types import IntArray
from dspark_ray.scheduling.load import Rates, ReplicaLoad
from dspark_ray.scheduling.router import RoutedRequest, rank
from dspark_ray.simulator.workload import Batch


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """What replicas have reported. All [N]."""

    num_running: IntArray
    num_waiting: IntArray
    free_tokens: IntArray  # that the KV cache has room for


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What does not change of a replica."""

    max_running: int
    rates: Rates
    prefill_ms_per_token: float


class Router(Protocol):
    """Called once a window with all its arrivals, in their order."""

    def choose(self, batch: Batch, load: FleetLoad, ready: IntArray) -> IntArray:
        """ready: the replicas that take requests. → [n] replicas"""
        ...


class RouterFactory(Protocol):
    """Makes a router; its randomness is the generator's."""

    def __call__(self, rng: np.random.Generator, replicas: Sequence[ReplicaFacts]) -> Router: ...


ROUTERS: Registry[RouterFactory] = Registry("router")


@ROUTERS.register("power_of_two")
class PowerOfTwo:
    """Two random replicas, the one with less load: Ray Serve's default.

    The load that it sees grows by what it has placed before in the same window, as Serve's cached queue
    lengths do.
    """

    _ROUND = 64  # requests placed on one view of the load

    def __init__(self, rng: np.random.Generator, replicas: Sequence[ReplicaFacts]) -> None:
        self._rng = rng

    def choose(self, batch: Batch, load: FleetLoad, ready: IntArray) -> IntArray:
        seen, num_requests = load.num_running + load.num_waiting, len(batch)
        chosen = np.empty(num_requests, dtype=np.int64)
        step = max(1, min(self._ROUND, len(ready) // 8))
        for begin in range(0, num_requests, step):
            count = min(step, num_requests - begin)
            pairs = ready[self._rng.integers(len(ready), size=(count, 2))]
            better = pairs[np.arange(count), np.argmin(seen[pairs], axis=1)]
            chosen[begin : begin + count] = better
            np.add.at(seen, better, 1)
        return chosen


@ROUTERS.register("random")
class RandomRouter:
    """No knowledge."""

    def __init__(self, rng: np.random.Generator, replicas: Sequence[ReplicaFacts]) -> None:
        self._rng = rng

    def choose(self, batch: Batch, load: FleetLoad, ready: IntArray) -> IntArray:
        return ready[self._rng.integers(len(ready), size=len(batch))]


@ROUTERS.register("least_loaded")
class LeastLoaded:
    """Perfect knowledge: always the replica with the fewest requests."""

    def __init__(self, rng: np.random.Generator, replicas: Sequence[ReplicaFacts]) -> None:
        """Nothing is left to chance."""

    def choose(self, batch: Batch, load: FleetLoad, ready: IntArray) -> IntArray:
        seen, num_requests = (load.num_running + load.num_waiting)[ready], len(batch)
        chosen = np.empty(num_requests, dtype=np.int64)
        for index in range(num_requests):
            place = int(np.argmin(seen))
            chosen[index] = ready[place]
            seen[place] += 1
        return chosen


@ROUTERS.register("score")
class ScoreRouter:
    """The program's own router (`scheduling/router.py`), without sessions or shared beginnings.

    It looks at every request by itself: with hundreds of replicas the slowest part of a simulation.
    """

    def __init__(self, rng: np.random.Generator, replicas: Sequence[ReplicaFacts]) -> None:
        self._rng, self._replicas = random.Random(int(rng.integers(1 << 62))), replicas

    def choose(self, batch: Batch, load: FleetLoad, ready: IntArray) -> IntArray:
        here = {str(replica): int(load.num_running[replica] + load.num_waiting[replica]) for replica in ready}
        loads = {str(replica): self._load(int(replica), load) for replica in ready}
        chosen = np.empty(len(batch), dtype=np.int64)
        for index in range(len(batch)):
            prompt, output = int(batch.prompt_tokens[index]), int(batch.output_tokens[index])
            best = rank(loads, here, RoutedRequest((0,) * prompt, output), {}, self._rng)[0]
            here[best] += 1
            chosen[index] = int(best)
        return chosen

    def _load(self, replica: int, load: FleetLoad) -> ReplicaLoad:
        facts = self._replicas[replica]
        return ReplicaLoad(
            num_running=int(load.num_running[replica]),
            num_waiting=int(load.num_waiting[replica]),
            max_running=facts.max_running,
            free_tokens=int(load.free_tokens[replica]),
            rates=facts.rates,
            prefill_ms_per_token=facts.prefill_ms_per_token,
        )
