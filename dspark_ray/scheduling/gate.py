"""Whether one request is drafted: not where nothing of it was verified for long.

Decided for the *next* step from past steps, so a block that exists is never thrown away for what is in it
(see `lengths.py`, "Losslessness").
"""

from dataclasses import dataclass


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
