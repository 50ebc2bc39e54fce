"""Training figures for TensorBoard; the package is only needed where it is asked for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_ray.core.errors import ConfigError
from dspark_ray.training.observer import Observer


class TensorBoardLog(Observer):
    """Writes every figure as a scalar, lists one scalar a position."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "tensorboard: true needs the package: pip install 'dspark-ray[tensorboard]'"
            ) from error
        self._writer = SummaryWriter(str(folder))  # type: ignore[no-untyped-call]

    def figures(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, list):
                for position, item in enumerate(value, start=1):
                    self._writer.add_scalar(f"{name}/{position}", item, step)
            else:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()
