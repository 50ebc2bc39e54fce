"""Who follows a training run: a terminal, TensorBoard, Ray Train."""

from collections.abc import Mapping
from typing import Any


class Observer:
    """Every process of a run calls its observers at the same steps, in the same order."""

    def figures(self, step: int, values: Mapping[str, Any]) -> None:
        """What a log line holds; of what was validated, only the first process knows."""

    def caching(self, share: float) -> None:
        """The first process has run the target over this share of the new data."""

    def saved(self, step: int) -> None:
        """The first process has written state and checkpoint."""
