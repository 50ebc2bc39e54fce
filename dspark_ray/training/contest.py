"""Drafters of several kinds trained on the same texts, block for block, and judged on the same held-out ones.

Every kind takes the same optimizer steps over the same sequences and anchors (one seed, one cache), so that
all have seen the same number of target tokens; wall time and parameters are reported beside the results. A
contest runs in chunks: what is finished is kept, the rest continues where it stopped.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark_ray.core.artefact import save_json
from dspark_ray.training.config import TrainingConfig
from dspark_ray.training.target import FrozenTarget
from dspark_ray.training.trainer import Run
from dspark_ray.training.validation import ValidationReport

KINDS = ("dspark", "dflash", "eagle3")
_NEVER_MINUTES = 1e9  # data that came in between would give the later kinds other texts
# What a kind cannot share with the others: EAGLE-3 has one layer, and starts from the last of those named.
_OWN_FIELDS = ("kind", "num_layers", "init_layers", "markov_rank", "confidence_head", "sample_from_anchor")


@dataclass(frozen=True, slots=True)
class Contestant:
    """One drafter's standing."""

    name: str  # within its contest
    kind: str
    num_layers: int
    block_size: int
    steps: int
    blocks: int
    num_parameters: int  # trained ones
    train_s: float  # wall time of all chunks, validation and saving included, filling the cache not
    finished: bool
    checkpoint: str
    report: ValidationReport | None  # on the held-out texts, once finished

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def contest_config(base: TrainingConfig, kind: str) -> TrainingConfig:
    """`base`, a DSpark configuration, for another kind: its own heads and layers, everything else alike."""
    raw = base.model_dump()
    shape = raw["architecture"]
    if kind != "dspark":
        first_layers = shape["init_layers"]
        shape = {name: value for name, value in shape.items() if name not in _OWN_FIELDS}
        one_layer = kind == "eagle3"
        shape["init_layers"] = first_layers[-1:] if one_layer else first_layers
        shape["num_layers"] = 1 if one_layer else base.architecture.num_layers
    raw["architecture"] = {**shape, "kind": kind}
    raw["output"] = base.output / kind
    raw["cache"]["refresh_minutes"] = _NEVER_MINUTES
    return TrainingConfig.model_validate(raw)


def hold_contest(
    base: TrainingConfig,
    target: FrozenTarget,
    kinds: Sequence[str] = KINDS,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> list[Contestant]:
    """Trains the kinds that are not finished, in order, until `stop()`; the standing of all of them."""
    return train_in_turn({kind: contest_config(base, kind) for kind in kinds}, target, stop=stop)


def train_in_turn(
    configs: Mapping[str, TrainingConfig],
    target: FrozenTarget,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> list[Contestant]:
    """Trains what is not finished, in order, until `stop()`; the standing of all. Each has a folder of its
    own, where a finished one's standing is kept."""
    return [_train(name, config, target, stop) for name, config in configs.items()]


def _train(name: str, config: TrainingConfig, target: FrozenTarget, stop: Callable[[], bool]) -> Contestant:
    kept = config.output / "standing.json"
    total_steps = config.optimizer.total_steps
    if kept.is_file():
        stored = json.loads(kept.read_text(encoding="utf-8"))
        if stored["steps"] == total_steps:
            return Contestant(**{**stored, "name": name, "report": ValidationReport(**stored["report"])})
    run = Run(config, target, stop)  # who comes first fills the cache that all read
    clock = _WallTime(config.output / "wall.json")
    learner = run.learner
    if learner.step < total_steps and not stop():
        run.loop()
        clock.add_elapsed()
    finished = learner.step >= total_steps
    if finished and run.report is None:
        run.validate()
    contestant = Contestant(
        name=name,
        kind=config.architecture.kind,
        num_layers=config.architecture.num_layers,
        block_size=config.architecture.block_size,
        steps=learner.step,
        blocks=learner.blocks,
        num_parameters=sum(p.numel() for p in learner.network.parameters()),
        train_s=clock.seconds,
        finished=finished,
        checkpoint=str(config.output / "checkpoint"),
        report=run.report if finished else None,
    )
    if contestant.finished:
        save_json(kept, contestant.as_json())
    return contestant


class _WallTime:
    """Seconds spent on one kind, over all chunks."""

    def __init__(self, path: Path) -> None:
        self._path, self._started = path, time.monotonic()
        stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"seconds": 0.0}
        self.seconds = float(stored["seconds"])

    def add_elapsed(self) -> None:
        self.seconds += time.monotonic() - self._started
        save_json(self._path, {"seconds": round(self.seconds, 1)})
