"""Whether to draft at all: the drafter's time is spent before any length is chosen.

Both questions are answered for the *next* step from past steps, so a block that exists is never thrown
away for what is in it (see `lengths.py`, "Losslessness").
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_ray.scheduling.lengths import throughput
from dspark_ray.scheduling.survival import Floats, rank_tokens
from dspark_ray.scheduling.utility import Claims, utility_curve


@dataclass(frozen=True, slots=True)
class GateSettings:
    """When a request stops being drafted, and how often it gets another chance."""

    zero_steps: int = 8  # steps in a row without a verified token
    probe_every: int = 16  # steps between two probes of a request that is not drafted


_DEFAULT_SETTINGS = GateSettings()


def should_draft(
    zero_budget_steps: int, steps_since_probe: int, settings: GateSettings = _DEFAULT_SETTINGS
) -> bool:
    """Whether one decoding request is drafted for the next step.

    zero_budget_steps: its last steps in a row in which none of its tokens was verified.
    steps_since_probe: steps since it was last drafted.
    """
    return zero_budget_steps < settings.zero_steps or steps_since_probe >= settings.probe_every


def speculation_pays(
    mean_survival: Floats,
    num_decoding: int,
    verify_cost_ms: NDArray[np.float64],
    draft_ms: float,
    *,
    hysteresis: float = 0.05,
    now_on: bool = True,
    claims: Claims | None = None,
    group_step_ms: float = 0.0,
) -> bool:
    """Whether this engine should speculate at its present load: best Θ with drafting billed, against plain Θ.

    mean_survival [γ]: live mean per position; verify_cost_ms [B + 1]: time of the target step with B draft
    tokens, *without* drafting; draft_ms: time to draft for `num_decoding` requests. What is on stays on
    until it loses by `hysteresis` (a share of plain throughput), what is off comes back when it wins by that.
    With claims it is utility that must win. A step that waits for its group lasts `group_step_ms` at least.
    """
    if num_decoding <= 0 or len(mean_survival) == 0:
        return False
    block = np.tile(np.asarray(mean_survival, dtype=np.float64), (num_decoding, 1))
    max_lens = np.full(num_decoding, block.shape[1], dtype=np.int64)
    drafting_ms = np.maximum(verify_cost_ms + draft_ms, group_step_ms)
    plain_ms = np.maximum(verify_cost_ms[:1], group_step_ms)
    if claims is None:
        ranked, _ = rank_tokens(block, max_lens)
        speculating = float(throughput(ranked[: len(drafting_ms) - 1], num_decoding, drafting_ms).max())
        plain = num_decoding / float(plain_ms[0])
    else:
        speculating = float(utility_curve(block, max_lens, claims, drafting_ms)[1].max())
        plain = float(utility_curve(block, max_lens, claims, plain_ms)[1][0])
    return speculating > plain * (1.0 - hysteresis if now_on else 1.0 + hysteresis)
