"""Groups that step together: a step of the group lasts as long as its slowest member's.

Pooling the members' tokens on one table goes wrong, since the tokens worth most may all be one member's: it
then waits for that member. Instead, for each candidate step time t, member i may verify up to
B_i(t) = max{B: T_i(B) ≤ t} at no extra cost, and t maximises Σ_i τ_i(B_i(t)) / t.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]

_MOST_CANDIDATES = 4096  # evenly spaced among the step times there are, if there are more
_SLACK = 1e-9  # of a step time that went through arithmetic elsewhere


@dataclass(frozen=True, slots=True)
class Member:
    """One member by its budget B = 0..N."""

    tokens: Float64Array  # [N + 1] τ_i(B), expected tokens of a step
    cost_ms: Float64Array  # [N + 1] T_i(B), non-decreasing


def best_step_ms(members: Sequence[Member]) -> float | None:
    """The step time at which the group emits most per second, the shortest of equals; None for no members."""
    if not members:
        return None
    least_ms = max(float(member.cost_ms[0]) for member in members)
    times = np.unique(np.concatenate([member.cost_ms for member in members]))
    times = times[times >= least_ms]
    if len(times) > _MOST_CANDIDATES:
        times = times[np.unique(np.linspace(0, len(times) - 1, _MOST_CANDIDATES).astype(np.int64))]
    tokens = np.zeros(len(times))
    for member in members:
        tokens += member.tokens[np.searchsorted(member.cost_ms, times, side="right") - 1]
    return float(times[np.argmax(tokens / times)])


def within_step(cost_ms: Float64Array, group_step_ms: float) -> tuple[Float64Array, int]:
    """What budgets cost a member in its group, and the most that keeps to the step time B_i(t).

    cost_ms [N + 1] alone → ([N + 1], tokens). A shorter step waits anyway: tokens up to there are free.
    """
    most = int(np.searchsorted(cost_ms, group_step_ms * (1 + _SLACK), side="right")) - 1
    return np.maximum(cost_ms, group_step_ms), max(most, 0)
