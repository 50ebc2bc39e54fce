"""From confidence logits to calibrated chances: c_k = σ(logit_k / T_k), T by acceptance rule."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dspark_ray.calibration.temperatures import Temperatures
from dspark_ray.core.digest import sha256_file
from dspark_ray.core.errors import ArtefactError
from dspark_ray.core.types import AcceptanceRule, FloatArray

log = logging.getLogger(__name__)

TEMPERATURES_FILE = "temperatures.json"
_MAX_LOGIT = 30.0  # far beyond any meaningful confidence; keeps exp finite


class CalibratedConfidence:
    """A checkpoint's temperatures, or T = 1 where it has none."""

    def __init__(self, temperatures: Temperatures, source: str) -> None:
        self._by_rule = {rule: temperatures.for_rule(rule) for rule in AcceptanceRule}  # rule → [γ]
        self.source = source

    def __call__(self, logits: FloatArray, rules: Sequence[AcceptanceRule]) -> FloatArray:
        """logits [R, γ] and each request's rule [R] → [R, γ] in (0, 1)."""
        temperature = np.stack([self._by_rule[rule] for rule in rules])[:, : logits.shape[1]]
        scaled = np.clip(logits / temperature, -_MAX_LOGIT, _MAX_LOGIT)
        return (1.0 / (1.0 + np.exp(-scaled))).astype(np.float32)


def load_confidence(checkpoint: Path, override: str | None, block_size: int) -> CalibratedConfidence:
    """The named temperatures, else those beside the checkpoint, else none (said in the log).

    Raises `ArtefactError` when they were made for another drafter or block size.
    """
    path = Path(override) if override is not None else checkpoint / TEMPERATURES_FILE
    if override is None and not path.is_file():
        log.warning("%s has no %s: its confidences are used uncalibrated", checkpoint, TEMPERATURES_FILE)
        return CalibratedConfidence(Temperatures.neutral(block_size), "uncalibrated")
    temperatures = Temperatures.load(path, expect={"drafter": drafter_digest(checkpoint)})
    if temperatures.block_size < block_size:
        raise ArtefactError(
            f"{path} has temperatures for {temperatures.block_size} positions, the drafter has {block_size}"
        )
    return CalibratedConfidence(temperatures, f"calibrated ({path.name})")


def drafter_digest(checkpoint: Path) -> str:
    """What a drafter's temperatures and step tables are tied to: its weights."""
    return sha256_file(checkpoint / "model.safetensors")[:16]
