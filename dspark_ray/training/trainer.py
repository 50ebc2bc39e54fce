"""Trains a drafter on one process or many; restartable at any moment, with another number of them too.

    python -m dspark_ray.training.trainer configs/training/smollm2-dspark-block7.yaml [--minutes 90]
    torchrun --nproc-per-node 2 -m dspark_ray.training.trainer CONFIG.yaml

The run's folder holds `state.pt` (to continue), `metrics.jsonl` (what was logged) and `checkpoint/` (the
averaged drafter, ready to serve). SIGTERM and Ctrl-C save and stop; the same command continues, with
whatever lines the data files gained. A killed process loses at most `save_minutes` of work.
"""

import argparse
import json
import logging
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from dspark_ray.core.errors import ArtefactError, ConfigError
from dspark_ray.models.drafters.checkpoint import save_checkpoint
from dspark_ray.observability.progress import NowAndThen
from dspark_ray.training.cache import TargetCache
from dspark_ray.training.config import TrainingConfig, load_training_config
from dspark_ray.training.forward import share_weights
from dspark_ray.training.learner import Learner, NonFiniteLossError, learning_rate
from dspark_ray.training.losses import LossParts
from dspark_ray.training.observer import Observer
from dspark_ray.training.ranks import Ranks, join_ranks
from dspark_ray.training.setup import build_network, checkpoint_vocabulary, choose_draft_vocabulary
from dspark_ray.training.target import FrozenTarget, TransformersTarget
from dspark_ray.training.tensorboard import TensorBoardLog
from dspark_ray.training.validation import ValidationReport, validate

logger = logging.getLogger(__name__)

CHECKPOINT_FOLDER = "checkpoint"
MAX_BAD_STEPS = 3  # in a row: that many are no bad data, the training has diverged


class Run:
    """A learner with its folder, its cache and its clock."""

    def __init__(
        self,
        config: TrainingConfig,
        target: FrozenTarget,
        stop: Callable[[], bool],
        *,
        ranks: Ranks | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._ranks = ranks or Ranks()
        if config.sequences_per_step < self._ranks.count * config.accumulate:
            raise ConfigError(
                f"sequences_per_step ({config.sequences_per_step}) must be at least processes × accumulate "
                f"({self._ranks.count} × {config.accumulate})"
            )
        self._observers = observers
        self.config = config
        self.target = target
        self._stop = stop
        self._bad_steps = 0  # in a row
        self._started = time.monotonic()
        config.output.mkdir(parents=True, exist_ok=True)
        self._state_path = config.output / "state.pt"
        self.cache = TargetCache(config.cache.folder, cache_spec(config, target))
        self.refresh()
        self.learner = self._build_learner()
        self.report: ValidationReport | None = None  # the newest, of this process's own steps

    def _build_learner(self) -> Learner:
        torch.manual_seed(self.config.seed)
        architecture = self.config.architecture
        state = _load_state(self._state_path)
        if state is not None:
            draft_to_target = state["draft_to_target"]
        elif self.config.trainable == "confidence" and self.config.start_from is not None:
            draft_to_target = checkpoint_vocabulary(self.config.start_from)
        else:
            draft_to_target = choose_draft_vocabulary(self.cache, self.target, architecture)
        network = build_network(architecture, self.target, draft_to_target, self.config.start_from)
        shared = share_weights(
            self.target.embedding, self.target.head_weight, draft_to_target, bf16=self.config.bf16
        )
        learner = Learner(self.config, network, shared, self._ranks)
        logger.info("this process holds %d of %d parameters", *learner.num_parameters())
        if state is not None:
            learner.load_state(state)
            logger.info("continuing %s at step %d", self.config.output, learner.step)
        return learner

    def should_stop(self) -> bool:
        """Asked to stop, or out of time."""
        minutes = self.config.minutes
        return self._stop() or (minutes is not None and time.monotonic() - self._started > 60.0 * minutes)

    def refresh(self) -> None:
        """Take in what the data files gained, and choose training and held-out sequences."""
        config = self.config.cache
        began, before = time.monotonic(), self.cache.num_response_tokens
        if self._ranks.is_first:
            self.cache.extend(
                data_files(self.config.data),
                self.target,
                layer_ids=self.config.architecture.target_layer_ids,
                top_k=config.top_k,
                max_length=config.max_length,
                max_bytes=int(config.max_gb * 1e9),
                skip_bad_lines=self.config.bad_data == "skip",
                stop=self.should_stop,
                on_progress=self._caching(),
            )
        self._ranks.wait()
        if not self._ranks.is_first:
            self.cache.reload()
        total, seconds = self.cache.num_response_tokens, time.monotonic() - began
        logger.info(
            "cache: %d sequences, %d response tokens, %.2f GB; %d tokens came in %.0f s",
            *(len(self.cache), total, self.cache.num_bytes / 1e9, total - before, seconds),
        )
        every = self.config.validation_every
        if len(self.cache) < every:
            raise ConfigError(f"the data hold {len(self.cache)} usable samples; at least {every} are needed")
        held_out = range(0, len(self.cache), every)[: self.config.validation_sequences]
        self.held_out = [self.cache.sequence(number) for number in held_out]
        self._training = [number for number in range(len(self.cache)) if number % every]
        self._lengths = torch.tensor([self.cache.length(number) for number in self._training])

    def _caching(self) -> Callable[[float], None]:
        """Tells the observers, and the log now and then, how much of the new data is cached."""
        pause = NowAndThen()

        def tell(share: float) -> None:
            for observer in self._observers:
                observer.caching(share)
            if pause.due():
                logger.info("cache: %.0f%% of the new data after %.0f s", 100 * share, pause.elapsed_s)

        return tell

    def loop(self) -> None:
        """Train until the last step, the end of the time or a request to stop; then validate and save."""
        learner, config = self.learner, self.config
        saved, refreshed = Timer(config.save_minutes), Timer(config.cache.refresh_minutes)
        rate = Rate(learner.blocks)
        while learner.step < config.optimizer.total_steps:
            # Clocks and signals are the first process's: all do the same after the same step.
            stop, save, refresh = self._ranks.agree([self.should_stop(), saved.due(), refreshed.due()])
            if stop:
                break
            if save:
                self.save()
            if refresh:
                self.refresh()
            loss = self._train_step()
            if loss is None:
                continue
            if learner.step % config.log_steps == 0:
                self.log(
                    blocks=learner.blocks,
                    blocks_per_s=rate.update(learner.blocks),
                    loss=loss.total.item(),
                    cross_entropy=loss.cross_entropy,
                    total_variation=loss.total_variation,
                    confidence=loss.confidence,
                    learning_rate=learning_rate(learner.step, config.optimizer),
                )
            if learner.step % config.validation_steps == 0:
                self.validate()
        self.validate()
        self.save()

    def _train_step(self) -> LossParts | None:
        """One step; None where its loss is not finite and bad data are skipped. Raises
        `NonFiniteLossError`, with the lines of its data, otherwise, and for the third in a row."""
        learner = self.learner
        try:
            loss = learner.train_step(learner.sample_batch(self.cache, self._training, self._lengths))
        except NonFiniteLossError as error:
            lines = ", ".join(self.cache.origin(number) for number in error.numbers)
            named = NonFiniteLossError(f"{error}, over {lines}", error.numbers)
            self._bad_steps += 1
            if self.config.bad_data == "stop" or self._bad_steps >= MAX_BAD_STEPS:
                raise named from error
            logger.warning("skipped %s", named)
            learner.skip_step()
            return None
        self._bad_steps = 0
        return loss

    def validate(self) -> None:
        """Log the averaged drafter's accepted length on the held-out sequences; kept as `report`."""
        averaged = self.learner.whole_average()
        if averaged is None:
            self.log()
            return
        report = validate(averaged, self.held_out, self.learner.shared, bf16=self.config.bf16)
        self.report = report
        self.log(
            tau_greedy=report.tau_greedy,
            tau_sampling=report.tau_sampling,
            acceptance_greedy=report.acceptance_greedy,
            acceptance_sampling=report.acceptance_sampling,
            confidence_error=report.confidence_error,
        )

    def save(self) -> None:
        """The state, replaced atomically, and the averaged drafter as a checkpoint."""
        state = self.learner.state()
        if self._ranks.is_first:
            partial = self._state_path.with_suffix(".partial")
            torch.save(state, partial)
            partial.replace(self._state_path)
            config = self.learner.network.config
            draft_to_target = self.learner.shared.draft_to_target if config.draft_vocab_size else None
            save_checkpoint(
                self.config.output / CHECKPOINT_FOLDER, config, state["averaged"], draft_to_target
            )
        for observer in self._observers:
            observer.saved(self.learner.step)

    def log(self, **values: Any) -> None:
        """One line to the log and one to the run's metrics, by the first process; and the observers."""
        step, minutes = self.learner.step, (time.monotonic() - self._started) / 60.0
        rounded = {name: _rounded(value) for name, value in (values | {"minutes": minutes}).items()}
        if self._ranks.is_first:
            logger.info("step %d: %s", step, " ".join(f"{name}={v}" for name, v in rounded.items()))
            with (self.config.output / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step} | rounded) + "\n")
        for observer in self._observers:
            observer.figures(step, rounded)


class Timer:
    """`due()` is true once per `minutes`."""

    def __init__(self, minutes: float) -> None:
        self._seconds = 60.0 * minutes
        self._last = time.monotonic()

    def due(self) -> bool:
        if time.monotonic() - self._last < self._seconds:
            return False
        self._last = time.monotonic()
        return True


class Rate:
    """Growth of a counter per second since the last call, everything in between included."""

    def __init__(self, count: int) -> None:
        self._count, self._time = count, time.monotonic()

    def update(self, count: int) -> float:
        now = time.monotonic()
        rate = (count - self._count) / (now - self._time)
        self._count, self._time = count, now
        return rate


def cache_spec(config: TrainingConfig, target: FrozenTarget) -> dict[str, object]:
    """What decides a cache's content: the target's weights, the taps, the number of probabilities."""
    return {
        "target": target.digest,
        "target_layer_ids": list(config.architecture.target_layer_ids),
        "top_k": config.cache.top_k,
    }


def data_files(patterns: tuple[Path, ...]) -> list[Path]:
    """Existing files behind the configured paths, whose last part may hold wildcards."""
    return [path for pattern in patterns for path in sorted(pattern.parent.glob(pattern.name))]


def _load_state(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except Exception as error:  # torch.load raises what its parsers raise: zip, pickle, runtime errors
        raise ArtefactError(f"{path} is damaged ({error}); remove it to start over") from error
    return state


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def train(
    config: TrainingConfig, observers: Sequence[Observer] = (), stop: Callable[[], bool] | None = None
) -> None:
    """Run or continue the training that `config` describes, with the processes that torchrun or Ray Train
    started. It stops after a step when `stop` says so; by default on SIGTERM and SIGINT (main thread only).

    Raises `ConfigError` (too little data, an architecture that does not fit), `ArtefactError` (a cache or
    state made for something else), `DataError` (a bad line, with `bad_data: stop`) and `NonFiniteLossError`.
    """
    ranks = join_ranks()
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    observers = list(observers)
    if config.tensorboard and ranks.is_first:
        observers.append(TensorBoardLog(config.output / "tensorboard"))
    with _StopSignal() if stop is None else nullcontext(stop) as requested:
        target = TransformersTarget(config.target)
        Run(config, target, requested, ranks=ranks, observers=observers).loop()
    ranks.leave()


class _StopSignal:
    """Turns SIGTERM and SIGINT into a request to stop after the current step."""

    def __enter__(self) -> Callable[[], bool]:
        """Whether to stop."""
        self._requested = False
        self._before = {
            number: signal.signal(number, self._request) for number in (signal.SIGTERM, signal.SIGINT)
        }
        return lambda: self._requested

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, *_: object) -> None:
        logger.info("stopping after this step")
        self._requested = True


def main() -> None:
    """Command line of `python -m dspark_ray.training.trainer`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--minutes", type=float, help="save and stop after this wall time")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    overrides = {"minutes": arguments.minutes} if arguments.minutes else {}
    train(load_training_config(arguments.config, **overrides))


if __name__ == "__main__":
    main()
