"""One process of a training whose course a test looks at; run it by torchrun, or alone.

python -m tests.training_process CONFIG.yaml STEP    stops, resumable, after STEP
"""

import logging
import sys
from pathlib import Path

from dspark_ray.training.config import load_training_config
from dspark_ray.training.observer import Observer
from dspark_ray.training.trainer import train


class StopAt(Observer):
    """Asks a run to stop once a step has been logged; with `log_steps: 1`, after exactly that step."""

    def __init__(self, step: int) -> None:
        self._last, self.reached = step, False

    def figures(self, step: int, values: object) -> None:
        self.reached = self.reached or step >= self._last


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    at = StopAt(int(sys.argv[2]))
    train(load_training_config(Path(sys.argv[1])), [at], stop=lambda: at.reached)
