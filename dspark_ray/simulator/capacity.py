"""What one replica carries when requests come by chance: requests per second against TPOT.

Requests that come at random times find now few, now many others. A replica shares its steps evenly among
those that it runs (processor sharing), so the time for which it holds n of them depends on the mean lengths
of prompts and answers only, not on how they are distributed: with λ arrivals a second and μ(n) answers a
second while n decode,

    P(n) ∝ Π_{k ≤ n} λ / μ(k),     TPOT = E[n] / (λ · decoded tokens of an answer)     (Little's law).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_BISECTIONS = 50


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """A replica that always decodes `requests` requests."""

    requests: int
    service_s: float  # of the replica that one request takes, its prompt included
    step_ms: float
    budget_tokens: float  # verified a step


@dataclass(frozen=True, slots=True)
class Carried:
    """One replica at one rate of random arrivals; means over time."""

    rate_per_s: float
    requests: float  # decoding
    tpot_ms: float
    budget_tokens: float  # verified a step


class ReplicaCapacity:
    """One replica's answers and TPOT by rate."""

    def __init__(
        self, points: Sequence[LoadPoint], decoded_tokens: float, max_running: int, max_waiting: int
    ) -> None:
        """points: by ascending load, 1 the first; decoded_tokens: of an answer, its first one not counted."""
        known = np.array([point.requests for point in points], dtype=np.float64)
        running = np.minimum(np.arange(max_running + max_waiting + 1), max_running)
        self._running: Floats = running.astype(np.float64)  # [n + 1] decoding while n are there

        def at(values: list[float]) -> Floats:
            return np.asarray(np.interp(np.maximum(running, 1), known, values), dtype=np.float64)

        # The time in which each of n requests is served once grows by steps' times: nearly in a line.
        rounds_s = at([point.requests * point.service_s for point in points])[1:]
        self._log_mu = np.log(self._running[1:]) - np.log(rounds_s)
        self._steps = np.where(running > 0, 1.0 / at([point.step_ms for point in points]), 0.0)
        self._budget = at([point.budget_tokens for point in points])
        self._decoded_tokens = max(decoded_tokens, 1.0)

    def at(self, rate_per_s: float) -> Carried:
        """What `rate_per_s` arrivals a second make of it; what its queue has no place for is refused."""
        log_share = np.concatenate(([0.0], np.cumsum(np.log(rate_per_s) - self._log_mu)))
        share = np.exp(log_share - log_share.max())
        share /= share.sum()
        taken = rate_per_s * (1.0 - share[-1])
        requests = float(share @ self._running)
        steps = share * self._steps
        return Carried(
            rate_per_s=rate_per_s,
            requests=requests,
            tpot_ms=float(1e3 * requests / (taken * self._decoded_tokens)),
            budget_tokens=float(steps @ self._budget / steps.sum()),
        )

    def most(self, tpot_ms: float) -> Carried | None:
        """The highest rate at which the mean TPOT is kept and next to nothing is refused; None if even a
        request alone is slower."""
        low, high = 0.0, float(np.exp(self._log_mu.max()))
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.at(middle).tpot_ms <= tpot_ms else (low, middle)
        return self.at(low) if low > 0 else None
