"""How much faster one system is than another, from rounds in which both answered the same prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

_DRAWS = 2000


@dataclass(frozen=True, slots=True)
class Run:
    """One system in one round, as clients saw it."""

    tokens_per_s: float
    tokens: NDArray[np.float64]  # [prompts] of each answer
    busy_s: NDArray[np.float64]  # [prompts] from request to end


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median over rounds of the throughput's ratio, with a 95% interval."""

    median: float
    low: float
    high: float


def throughput_ratio(mine: Sequence[Run], other: Sequence[Run], seed: int = 0) -> Ratio:
    """Round by round, mine to the other's.

    The interval is a bootstrap of both levels: rounds are drawn, and in each round the prompts, the same
    ones for both systems. What a draw of prompts does to a run's throughput is taken from the requests'
    own tokens and times. With few rounds it says little of how rounds differ, much of how prompts do.
    """
    assert len(mine) == len(other) > 0, "each round has both systems"
    rng, rounds = np.random.default_rng(seed), len(mine)
    wall = np.array([a.tokens_per_s / b.tokens_per_s for a, b in zip(mine, other, strict=True)])
    resampled = np.array([_resampled(a, b, rng) for a, b in zip(mine, other, strict=True)])  # [rounds, draws]
    drawn = rng.integers(rounds, size=(_DRAWS, rounds))
    values = np.median(wall[drawn] * resampled[drawn, np.arange(_DRAWS)[:, None]], axis=1)
    low, high = np.percentile(values, [2.5, 97.5])
    return Ratio(float(np.median(wall)), float(low), float(high))


def pairwise(runs: Mapping[str, Sequence[Run]]) -> list[dict[str, str | float]]:
    """Every system to every other one; `runs` holds each one's rounds in the same order."""
    return [
        {"system": mine, "to": other}
        | {key: round(value, 3) for key, value in asdict(throughput_ratio(runs[mine], runs[other])).items()}
        for mine, other in permutations(runs, 2)
    ]


def _resampled(mine: Run, other: Run, rng: np.random.Generator) -> NDArray[np.float64]:
    """[draws] the ratio of speeds over drawn prompts, relative to that over all prompts."""
    count = len(mine.tokens)
    drawn = rng.integers(count, size=(_DRAWS, count))

    def speed(run: Run, chosen: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.asarray(run.tokens[chosen].sum(axis=-1) / run.busy_s[chosen].sum(axis=-1))

    everything = np.arange(count)
    return (speed(mine, drawn) / speed(other, drawn)) / (speed(mine, everything) / speed(other, everything))
