"""The temperatures of a drafter's confidences, as an artefact on disk.

A confidence belongs to one acceptance rule: under `rejection` it estimates 1 − TV of the two distributions,
under `greedy` the agreement of their top tokens, under `shared_noise` that of two draws with one noise. Each
rule has its own vector; `shared_noise` takes that of `rejection` where it was not calibrated, which says too
much: it accepts less (docs/method.md).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_ray.core.artefact import check_made_from, load_json, save_json
from dspark_ray.core.errors import ArtefactError
from dspark_ray.core.types import AcceptanceRule

FORMAT = "dspark-temperatures/1"
ACCEPTANCE_RULES = tuple(rule.value for rule in AcceptanceRule)


@dataclass(frozen=True, eq=False)
class Temperatures:
    """One vector per acceptance rule. Raises `ArtefactError` for unknown rules and impossible values."""

    by_rule: dict[str, NDArray[np.float64]]  # rule → [γ], all above 0
    made_from: dict[str, Any] = field(default_factory=dict)  # target and drafter digests, data, ...

    def __post_init__(self) -> None:
        if not self.by_rule:
            raise ArtefactError("temperatures: no acceptance rule has any")
        checked = {rule: _checked_vector(rule, values) for rule, values in self.by_rule.items()}
        if len({len(vector) for vector in checked.values()}) > 1:
            raise ArtefactError("temperatures: the rules' vectors differ in length")
        object.__setattr__(self, "by_rule", checked)

    @classmethod
    def neutral(cls, block_size: int) -> "Temperatures":
        """T = 1 for every rule: the head's own confidences."""
        return cls({rule: np.ones(block_size) for rule in ACCEPTANCE_RULES})

    @property
    def block_size(self) -> int:
        """γ of the drafter that they are for."""
        return len(next(iter(self.by_rule.values())))

    def for_rule(self, rule: str) -> NDArray[np.float64]:
        """[γ]; raises `ArtefactError` if this rule was not calibrated."""
        if rule == AcceptanceRule.SHARED_NOISE and rule not in self.by_rule:
            rule = AcceptanceRule.REJECTION
        if rule not in self.by_rule:
            raise ArtefactError(f"no temperatures for the acceptance rule {rule!r}; calibrate it")
        return self.by_rule[rule]

    def save(self, path: Path) -> None:
        """As JSON, whole or not at all."""
        vectors = {rule: vector.tolist() for rule, vector in self.by_rule.items()}
        save_json(path, {"format": FORMAT, "by_rule": vectors, "made_from": self.made_from})

    @classmethod
    def load(cls, path: Path, expect: dict[str, Any] | None = None) -> "Temperatures":
        """Raises `ArtefactError` if damaged or if a key of `expect` differs from `made_from`."""
        data = load_json(path, "temperatures", FORMAT)
        by_rule, made_from = data.get("by_rule"), data.get("made_from", {})
        if not isinstance(by_rule, dict) or not isinstance(made_from, dict):
            raise ArtefactError(f"temperatures {path}: by_rule and made_from must be objects")
        check_made_from(f"temperatures {path}", made_from, expect, "calibrate again")
        return cls(by_rule, made_from)


def _checked_vector(rule: str, values: Any) -> NDArray[np.float64]:
    if rule not in ACCEPTANCE_RULES:
        raise ArtefactError(f"temperatures: unknown acceptance rule {rule!r}")
    try:
        vector = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ArtefactError(f"temperatures of {rule!r}: a list of numbers is needed") from error
    if vector.ndim != 1 or not len(vector) or not (np.isfinite(vector) & (vector > 0)).all():
        raise ArtefactError(f"temperatures of {rule!r}: they must be finite and above 0, one a position")
    vector.flags.writeable = False
    return vector
