"""From confidence logits to calibrated chances: c_k = σ(logit_k / T_k + b_k), T and b by acceptance rule."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dspark_ray.calibration.online import LearnedDraft, OnlineEstimator
from dspark_ray.calibration.temperatures import Temperatures
from dspark_ray.core.digest import sha256_file
from dspark_ray.core.errors import ArtefactError
from dspark_ray.core.types import AcceptanceRule, FloatArray
from dspark_ray.models.drafters.base import Outcome
from dspark_ray.models.drafters.rates import AcceptanceRates
from dspark_ray.models.transfer import to_device

log = logging.getLogger(__name__)

TEMPERATURES_FILE = "temperatures.json"
_MAX_LOGIT = 30.0  # far beyond any meaningful confidence; keeps exp finite


class CalibratedConfidence:
    """A checkpoint's temperatures, or T = 1 where it has none."""

    def __init__(self, temperatures: Temperatures, source: str) -> None:
        scalings = {rule: temperatures.scaling(rule) for rule in AcceptanceRule}
        self._by_rule = {rule: (s.temperatures, s.offsets) for rule, s in scalings.items()}  # rule → [γ], [γ]
        self.source = source
        self._placed: Tensor | None = None  # on the device that asked last

    def __call__(self, logits: FloatArray, rules: Sequence[AcceptanceRule]) -> FloatArray:
        """logits [R, γ] and each request's rule [R] → [R, γ] in (0, 1)."""
        scaling = np.array([self._by_rule[rule] for rule in rules])[:, :, : logits.shape[1]]
        scaled = logits / scaling[:, 0] + scaling[:, 1]
        scaled = np.minimum(np.maximum(scaled, -_MAX_LOGIT), _MAX_LOGIT)
        return (1.0 / (1.0 + np.exp(-scaled))).astype(np.float32)

    def on_device(self, logits: Tensor, rules: Tensor) -> Tensor:
        """The same where the logits are. logits [R, n], rules [R] places in `tuple(AcceptanceRule)` →
        [R, n]"""
        if self._placed is None or self._placed.device != logits.device:
            scaling = np.array([self._by_rule[rule] for rule in AcceptanceRule])  # [rules, 2, γ]
            self._placed = to_device(torch.from_numpy(scaling), logits.device)
        divisors, offsets = self._placed[rules, :, : logits.shape[1]].unbind(1)
        scaled = (logits / divisors + offsets).clamp(-_MAX_LOGIT, _MAX_LOGIT)
        return torch.sigmoid(scaled).float()


@dataclass(frozen=True, slots=True)
class DraftNote:
    """What `OnlineConfidence` wants back with a draft's outcome."""

    rule: str
    features: FloatArray  # [n, F]
    baseline: FloatArray  # [n]


class OnlineConfidence:
    """Chances from an estimator that learns while serving. The head, or else the rate of each position, is
    its baseline and stands in where it is not better."""

    def __init__(self, block_size: int, head: CalibratedConfidence | None) -> None:
        self._head = head
        self._rates = AcceptanceRates(block_size)
        self._estimator = OnlineEstimator(block_size, num_features=2 if head is None else 3)
        self._step = 0

    @property
    def source(self) -> str:
        """For the start-up log."""
        over = "the rate of each position" if self._head is None else f"the {self._head.source} head"
        return f"learnt while serving, over {over}"

    def __call__(
        self, features: FloatArray, logits: FloatArray | None, rules: Sequence[AcceptanceRule]
    ) -> tuple[FloatArray, list[DraftNote]]:
        """Chances [R, n], and a note for each draft.

        features [R, n, 2] of the draft distributions, logits [R, n] of the head, the requests' rules [R].
        """
        if self._head is None or logits is None:
            baseline = np.tile(self._rates.rates[: features.shape[1]], (len(features), 1))
        else:
            baseline = self._head(logits, rules)
            features = np.concatenate((features, logits[..., None]), axis=-1)
        chances = self._estimator.predict(features.astype(np.float64), baseline.astype(np.float64), rules)
        notes = [DraftNote(*row) for row in zip(rules, features, baseline, strict=True)]
        return chances.astype(np.float32), notes

    def wants_full_verification(self) -> bool:
        """Called once a step: now and then whole drafts are verified, to learn from."""
        self._step += 1
        return self._estimator.explores(self._step)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learns from drafts that were verified in full for it."""
        self._rates.observe(outcomes)
        for outcome in outcomes:
            note = outcome.note
            if outcome.in_full and outcome.num_known and isinstance(note, DraftNote):
                features, baseline = note.features.astype(np.float64), note.baseline.astype(np.float64)
                self._estimator.learn(
                    LearnedDraft(note.rule, features, baseline, outcome.num_known, outcome.num_accepted)
                )


def load_confidence(checkpoint: Path, override: str | None, block_size: int) -> CalibratedConfidence:
    """The named temperatures, else those beside the checkpoint, else none (said in the log).

    Named ones raise `ArtefactError` when they were made for another drafter or block size. Those that merely
    lie beside a drafter that was trained again are left alone, with a warning; so is a rule that they lack.
    """
    path = Path(override) if override is not None else checkpoint / TEMPERATURES_FILE
    if override is None and not path.is_file():
        log.warning("%s has no %s: its confidences are used uncalibrated", checkpoint, TEMPERATURES_FILE)
        return _uncalibrated(block_size)
    try:
        temperatures = Temperatures.load(path, expect={"drafter": drafter_digest(checkpoint)})
        if temperatures.block_size < block_size:
            raise ArtefactError(
                f"{path} has temperatures for {temperatures.block_size} positions, "
                f"the drafter has {block_size}"
            )
    except ArtefactError as error:
        if override is not None:
            raise
        log.warning("%s; its confidences are used uncalibrated", error)
        return _uncalibrated(block_size)
    for rule in AcceptanceRule:
        used = temperatures.stand_in(rule)
        if used != rule:
            instead = "T = 1 is used" if used is None else f"those of {used} are used"
            log.warning("%s has no temperatures for %s: %s; calibrate again", path, rule.value, instead)
    return CalibratedConfidence(temperatures, f"calibrated ({path.name})")


def _uncalibrated(block_size: int) -> CalibratedConfidence:
    return CalibratedConfidence(Temperatures.neutral(block_size), "uncalibrated")


def drafter_digest(checkpoint: Path) -> str:
    """What a drafter's temperatures and step tables are tied to: its weights."""
    return sha256_file(checkpoint / "model.safetensors")[:16]
