"""Drafters of several kinds trained on the same texts, block for block, and judged on the same held-out ones.

Every kind takes the same optimizer steps over the same sequences and anchors (one seed, one cache), so that
all have seen the same number of target tokens; wall time and parameters are reported beside the results. A
contest runs in chunks: what is finished is kept, the rest continues where it stopped.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark_ray.core.artefact import save_json
from dspark_ray.training.config import TrainingConfig
from dspark_ray.training.target import FrozenTarget
from dspark_ray.training.trainer import Run
from dspark_ray.training.validation import ValidationReport, validate

KINDS = ("dspark", "dflash", "eagle3")
_NEVER_MINUTES = 1e9  # data that came in between would give the later kinds other texts
# What a kind cannot share with the others: EAGLE-3 has one layer, and starts from the last of those named.
_OWN_FIELDS = ("kind", "num_layers", "init_layers", "markov_rank", "confidence_head", "sample_from_anchor")


@dataclass(frozen=True, slots=True)
class Contestant:
    """One kind's standing."""

    kind: str
    steps: int
    blocks: int
    num_parameters: int  # trained ones
    train_s: float  # wall time of all chunks, validation and saving included
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
    """Trains what is not finished, in order, until `stop()`; the standing of all kinds."""
    standing = []
    for kind in kinds:
        config = contest_config(base, kind)
        clock = _WallTime(config.output / "wall.json")
        run = Run(config, target, stop)
        if run.learner.step < config.optimizer.total_steps and not stop():
            run.loop()
            clock.add_elapsed()
        finished = run.learner.step >= config.optimizer.total_steps
        learner = run.learner
        report = None
        if finished:
            report = validate(learner.averaged, run.held_out, learner.shared, bf16=config.bf16)
        standing.append(
            Contestant(
                kind=kind,
                steps=learner.step,
                blocks=learner.blocks,
                num_parameters=sum(p.numel() for p in learner.network.parameters()),
                train_s=clock.seconds,
                finished=finished,
                checkpoint=str(config.output / "checkpoint"),
                report=report,
            )
        )
    return standing


class _WallTime:
    """Seconds spent on one kind, over all chunks."""

    def __init__(self, path: Path) -> None:
        self._path, self._started = path, time.monotonic()
        stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"seconds": 0.0}
        self.seconds = float(stored["seconds"])

    def add_elapsed(self) -> None:
        self.seconds += time.monotonic() - self._started
        save_json(self._path, {"seconds": round(self.seconds, 1)})
