"""When the requests of an open loop are sent: as Poisson has it, in bursts, or as a log has it."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dspark_ray.simulator.workload import read_arrivals


def random_arrivals(
    rate: float, count: int, rng: np.random.Generator, burstiness: float = 1.0
) -> NDArray[np.float64]:
    """`count` times in seconds, `rate` a second in the mean, the first one at 0.

    Gaps follow a gamma law of shape `burstiness`, as in other load generators: 1 is Poisson, less comes in
    bursts, more is regular. The gaps' coefficient of variation is 1 / sqrt(burstiness).
    """
    assert rate > 0, "a load has a rate"
    assert burstiness > 0, "and a shape"
    gaps = rng.gamma(burstiness, 1.0 / (rate * burstiness), size=count)
    return np.cumsum(gaps) - gaps[0]


def logged_arrivals(
    path: Path, count: int, speed: float = 1.0
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The first `count` requests of a log: times in seconds, and how many tokens each answer had.

    Logs as `dspark-ray simulate` replays them; `speed` 2 is twice the load. `ArtefactError`.
    """
    batch = read_arrivals(path, (), speed)
    return batch.arrival_ms[:count] / 1e3, batch.output_tokens[:count]
