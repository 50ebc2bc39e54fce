"""The scaling of a drafter's confidences, as an artefact on disk.

A confidence belongs to one acceptance rule: under `rejection` it estimates 1 − TV of the two distributions,
under `greedy` the agreement of their top tokens, under `shared_noise` that of two draws with one noise. Each
rule has its own temperatures and offsets (sts.py). `shared_noise` takes those of `rejection` where it was not
calibrated, which says too much: it accepts less (docs/method.md). Files of format 1 have no offsets.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_ray.calibration.sts import Scaling
from dspark_ray.core.artefact import check_made_from, load_json, save_json
from dspark_ray.core.errors import ArtefactError
from dspark_ray.core.types import AcceptanceRule

FORMAT = "dspark-temperatures/2"
_OLDER = ("dspark-temperatures/1",)
ACCEPTANCE_RULES = tuple(rule.value for rule in AcceptanceRule)


@dataclass(frozen=True, eq=False)
class Temperatures:
    """The vectors of each acceptance rule. Raises `ArtefactError` for unknown rules and impossible values."""

    by_rule: dict[str, NDArray[np.float64]]  # rule → [γ], all above 0
    made_from: dict[str, Any] = field(default_factory=dict)  # target and drafter digests, data, ...
    offsets: dict[str, NDArray[np.float64]] = field(default_factory=dict)  # rule → [γ]; absent: none

    def __post_init__(self) -> None:
        if not self.by_rule:
            raise ArtefactError("temperatures: no acceptance rule has any")
        checked = {rule: _checked_vector(rule, values) for rule, values in self.by_rule.items()}
        for rule, vector in checked.items():
            if not (vector > 0).all():
                raise ArtefactError(f"temperatures of {rule!r}: they must be above 0")
        if unknown := self.offsets.keys() - checked.keys():
            raise ArtefactError(f"temperatures: offsets without temperatures for {sorted(unknown)}")
        offsets = {
            rule: _checked_vector(rule, self.offsets.get(rule, np.zeros_like(vector)))
            for rule, vector in checked.items()
        }
        if len({len(vector) for vector in (*checked.values(), *offsets.values())}) > 1:
            raise ArtefactError("temperatures: the rules' vectors differ in length")
        object.__setattr__(self, "by_rule", checked)
        object.__setattr__(self, "offsets", offsets)

    @classmethod
    def neutral(cls, block_size: int) -> "Temperatures":
        """T = 1 for every rule: the head's own confidences."""
        return cls({rule: np.ones(block_size) for rule in ACCEPTANCE_RULES})

    @classmethod
    def of(cls, scalings: dict[str, Scaling], made_from: dict[str, Any]) -> "Temperatures":
        """Those of each rule's scaling."""
        temperatures = {rule: scaling.temperatures for rule, scaling in scalings.items()}
        return cls(temperatures, made_from, {rule: scaling.offsets for rule, scaling in scalings.items()})

    @property
    def block_size(self) -> int:
        """γ of the drafter that they are for."""
        return len(next(iter(self.by_rule.values())))

    def stand_in(self, rule: str) -> str | None:
        """Whose scaling a rule uses: its own, shared noise else that of rejection; None: nobody's, T = 1."""
        if rule == AcceptanceRule.SHARED_NOISE and rule not in self.by_rule:
            rule = AcceptanceRule.REJECTION
        return rule if rule in self.by_rule else None

    def scaling(self, rule: str) -> Scaling:
        """What this rule's logits go through."""
        found = self.stand_in(rule)
        if found is None:
            return Scaling.identity(self.block_size)
        return Scaling(self.by_rule[found], self.offsets[found])

    def save(self, path: Path) -> None:
        """As JSON, whole or not at all."""
        vectors = {rule: vector.tolist() for rule, vector in self.by_rule.items()}
        offsets = {rule: vector.tolist() for rule, vector in self.offsets.items()}
        save_json(
            path, {"format": FORMAT, "by_rule": vectors, "offsets": offsets, "made_from": self.made_from}
        )

    @classmethod
    def load(cls, path: Path, expect: dict[str, Any] | None = None) -> "Temperatures":
        """Raises `ArtefactError` if damaged or if a key of `expect` differs from `made_from`."""
        data = load_json(path, "temperatures", FORMAT, *_OLDER)
        by_rule, made_from, offsets = data.get("by_rule"), data.get("made_from", {}), data.get("offsets", {})
        if not (isinstance(by_rule, dict) and isinstance(made_from, dict) and isinstance(offsets, dict)):
            raise ArtefactError(f"temperatures {path}: by_rule, offsets and made_from must be objects")
        check_made_from(f"temperatures {path}", made_from, expect, "calibrate again")
        return cls(by_rule, made_from, offsets)


def _checked_vector(rule: str, values: Any) -> NDArray[np.float64]:
    if rule not in ACCEPTANCE_RULES:
        raise ArtefactError(f"temperatures: unknown acceptance rule {rule!r}")
    try:
        vector = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ArtefactError(f"temperatures of {rule!r}: a list of numbers is needed") from error
    if vector.ndim != 1 or not len(vector) or not np.isfinite(vector).all():
        raise ArtefactError(f"temperatures of {rule!r}: finite numbers are needed, one a position")
    vector.flags.writeable = False
    return vector
