"""A training as a Ray Train job: the same trainer, one process a worker, wherever the cluster has room.

    train_on_ray(TrainingJob(config, num_workers=2, cpus_per_worker=4))

Ray Train places the workers, joins them to one torch group and starts them all again when one is lost; they
then continue from the run's folder. Data, cache and output must be seen by every node at the same paths.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from dspark_ray.core.errors import ConfigError, DsparkError
from dspark_ray.runtime.logs import configure_logging
from dspark_ray.runtime.names import NAMESPACE
from dspark_ray.training.config import TrainingConfig
from dspark_ray.training.observer import Observer
from dspark_ray.training.ranks import PATIENCE
from dspark_ray.training.trainer import CHECKPOINT_FOLDER, train

logger = logging.getLogger(__name__)

RESULTS_FOLDER = "ray"  # inside the run's output: what Ray Train keeps of every start


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A training and what its workers get."""

    config: TrainingConfig
    num_workers: int = 1
    cpus_per_worker: int = 1
    max_failures: int = 0  # how often lost workers are replaced


def train_on_ray(job: TrainingJob) -> Path | None:
    """Run or continue a training on the present cluster, that of RAY_ADDRESS or a local one. Returns the last
    checkpoint that Ray Train keeps; None where the run had ended before.

    Raises what the trainer raises, and `DsparkError` with the first worker's words for everything else.
    """
    _require_ray_train()
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    if not ray.is_initialized():
        ray.init(address=os.environ.get("RAY_ADDRESS", "local"), namespace=NAMESPACE)
    config = _with_absolute_paths(job.config, job.cpus_per_worker)
    trainer = TorchTrainer(
        _work,
        train_loop_config=config.model_dump(mode="json"),
        torch_config=TorchConfig(backend="gloo", timeout_s=int(PATIENCE.total_seconds())),
        scaling_config=ScalingConfig(
            num_workers=job.num_workers, resources_per_worker={"CPU": job.cpus_per_worker}
        ),
        run_config=RunConfig(
            storage_path=str(config.output / RESULTS_FOLDER),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
            failure_config=FailureConfig(max_failures=job.max_failures),
        ),
    )
    try:
        result = trainer.fit()
    except TrainingFailedError as error:
        raise _known_error(error) from error
    return None if result.checkpoint is None else Path(result.checkpoint.path)


def _require_ray_train() -> None:
    try:
        import ray.train  # noqa: F401
    except ImportError as error:
        raise ConfigError("training on Ray needs its packages: pip install 'dspark-ray[train]'") from error


def _with_absolute_paths(config: TrainingConfig, num_threads: int) -> TrainingConfig:
    """Workers start in another directory, and compute with the CPUs that Ray has given them."""
    cache = config.cache.model_copy(update={"folder": config.cache.folder.absolute()})
    return config.model_copy(
        update={
            "target": config.target.absolute() if config.target.is_dir() else config.target,  # or a name
            "data": tuple(path.absolute() for path in config.data),
            "output": config.output.absolute(),
            "start_from": None if config.start_from is None else config.start_from.absolute(),
            "cache": cache,
            "num_threads": config.num_threads or num_threads,
        }
    )


def _work(raw: dict[str, Any]) -> None:
    """What every worker runs, on a thread of its own: signals are Ray's business."""
    configure_logging()
    config = TrainingConfig.model_validate(raw)
    train(config, [_Reports(config.output)], stop=lambda: False)


class _Reports(Observer):
    """Hands the newest figures and the checkpoint to Ray Train whenever a state has been saved.

    A report waits for all workers and for Ray Train's controller, which looks every two seconds: one a log
    line would slow a training down.
    """

    def __init__(self, output: Path) -> None:
        import ray.train

        self._output, self._train = output, ray.train
        self._is_first = ray.train.get_context().get_world_rank() == 0
        self._newest: dict[str, Any] = {}

    def figures(self, step: int, values: Mapping[str, Any]) -> None:
        self._newest.update(values)

    def saved(self, step: int) -> None:
        checkpoint = None
        if self._is_first:
            checkpoint = self._train.Checkpoint.from_directory(self._output / CHECKPOINT_FOLDER)
        self._train.report({"step": step, **self._newest}, checkpoint=checkpoint)


def _known_error(error: Exception) -> DsparkError:
    """The trainer's own error, if it is one; workers that only waited for the failed one know nothing."""
    failures: dict[int, Exception] = getattr(error, "worker_failures", {})
    # Ray wraps what a worker raised, to keep its traceback.
    causes = [getattr(failure, "_base_exc", failure) for _, failure in sorted(failures.items())]
    for cause in causes:
        if isinstance(cause, DsparkError):
            return cause
    return DsparkError(f"training on Ray failed: {causes[0] if causes else error}")
