"""From confidence logits to calibrated chances: c_k = σ(logit_k / T_k), T by acceptance rule."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_ray.core.types import FloatArray


@dataclass(frozen=True)
class Calibration:
    """One temperature per position and acceptance rule."""

    greedy: FloatArray  # [γ]
    rejection: FloatArray  # [γ]
    source: str

    def confidences(self, logits: FloatArray, greedy: NDArray[np.bool_]) -> FloatArray:
        """logits [R, γ], greedy [R] (the rule of each request) → [R, γ] in (0, 1)."""
        gamma = logits.shape[1]
        temperature = np.where(greedy[:, None], self.greedy[:gamma], self.rejection[:gamma])
        scaled = np.clip(logits / temperature, -30.0, 30.0)
        return (1.0 / (1.0 + np.exp(-scaled))).astype(np.float32)

    def describe(self) -> str:
        return self.source


def load_calibration(checkpoint: str, override: str | None, block_size: int) -> Calibration:
    ones = np.ones(block_size, dtype=np.float32)
    return Calibration(ones, ones, "uncalibrated")
