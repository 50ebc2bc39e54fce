"""Fits the temperatures of a drafter's confidences from drafts that were verified in full.

A scaling for each acceptance rule, from its own outcomes: greedy texts for `greedy`, texts at temperature 1
for `rejection`, seeded ones for `shared_noise`. How far the survivals are off is told on prompts that were
held out of the fit; the temperatures that are kept are then fitted on all prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from dspark_ray.calibration.reliability import ReliabilityBins, auroc, brier, ece, reliability_bins
from dspark_ray.calibration.sts import Scaling, fit_scaling, survival_outcomes
from dspark_ray.calibration.temperatures import Temperatures
from dspark_ray.core.errors import ConfigError
from dspark_ray.engine.draft_log import DraftRecord

HELD_OUT_EVERY = 3  # one prompt in this many is held out of the fit that is judged
MIN_DRAFTS = 200  # of one rule
MIN_EACH = 30  # blocks that survived a position, and that did not: with fewer, its AUROC is chance


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """One rule's calibration; errors are those of survival, on held-out prompts, one a position."""

    rule: str
    num_drafts: int
    scaling: Scaling  # [γ]
    before: list["Quality"]  # [γ] with T = 1
    after: list["Quality"]  # [γ]

    @property
    def mean_ece(self) -> tuple[float, float]:
        """Before and after, over the positions."""
        return mean(q.ece for q in self.before), mean(q.ece for q in self.after)

    @property
    def auroc_move(self) -> float:
        """The largest change of AUROC at a position with enough of both outcomes; NaN without any."""
        pairs = zip(self.before, self.after, strict=True)
        return max((abs(a.auroc - b.auroc) for b, a in pairs if b.tells), default=float("nan"))

    def as_json(self) -> dict[str, object]:
        """Everything as plain values; means of empty bins are null."""
        return {
            "rule": self.rule,
            "drafts": self.num_drafts,
            "temperatures": self.scaling.temperatures.tolist(),
            "offsets": self.scaling.offsets.tolist(),
            "mean_ece": [_plain(value) for value in self.mean_ece],
            "auroc_move": _plain(self.auroc_move),
            "before": [quality.as_json() for quality in self.before],
            "after": [quality.as_json() for quality in self.after],
        }


@dataclass(frozen=True, slots=True)
class Quality:
    """How good the survivals of one position are; of a position never reached ECE is 0, the rest NaN."""

    ece: float
    auroc: float
    brier: float
    tells: bool  # there are enough of both outcomes for the AUROC to mean something
    bins: ReliabilityBins

    def as_json(self) -> dict[str, object]:
        return {
            **{name: _plain(getattr(self, name)) for name in ("ece", "auroc", "brier")},
            "count": self.bins.count.tolist(),
            "mean_predicted": [_plain(value) for value in self.bins.mean_predicted.tolist()],
            "mean_outcome": [_plain(value) for value in self.bins.mean_outcome.tolist()],
        }


@dataclass(frozen=True, slots=True)
class _Drafts:
    """The records of some prompts as arrays."""

    logits: NDArray[np.float64]  # [N, γ]
    num_accepted: NDArray[np.int64]  # [N]
    num_verified: NDArray[np.int64]  # [N]

    def fit(self) -> Scaling:
        return fit_scaling(self.logits, self.num_accepted, self.num_verified)

    def judge(self, scaling: Scaling) -> list[Quality]:
        """The survivals of each position under this scaling. [γ]"""
        survival = np.cumprod(scaling.confidences(self.logits), axis=1)
        survived, known = survival_outcomes(self.num_accepted, self.num_verified, self.logits.shape[1])
        return [
            _quality(survival[known[:, k], k], survived[known[:, k], k].astype(np.float64))
            for k in range(self.logits.shape[1])
        ]


def calibrate(
    records_by_rule: Mapping[str, Sequence[DraftRecord]], made_from: dict[str, object]
) -> tuple[Temperatures, list[CalibrationReport]]:
    """The temperatures and, for each rule, what they change. `ConfigError` for too few drafts."""
    reports = [_calibrate_rule(rule, records) for rule, records in records_by_rule.items()]
    counts = {report.rule: report.num_drafts for report in reports}
    scalings = {report.rule: report.scaling for report in reports}
    return Temperatures.of(scalings, {**made_from, "drafts": counts}), reports


def _calibrate_rule(rule: str, records: Sequence[DraftRecord]) -> CalibrationReport:
    if len(records) < MIN_DRAFTS:
        raise ConfigError(
            f"{len(records)} drafts are too few to calibrate the rule {rule!r}; {MIN_DRAFTS} at least are "
            "needed: take more prompts or a higher --max-tokens"
        )
    if any(record.rule != rule for record in records):
        raise ConfigError(f"the rule {rule!r} can only be calibrated on its own outcomes")
    number = {name: index for index, name in enumerate(dict.fromkeys(r.request_id for r in records))}
    held_out = [number[record.request_id] % HELD_OUT_EVERY == 0 for record in records]
    judged = _stack([r for r, out in zip(records, held_out, strict=True) if out])
    fitted = _stack([r for r, out in zip(records, held_out, strict=True) if not out]).fit()
    return CalibrationReport(
        rule=rule,
        num_drafts=len(records),
        scaling=_stack(records).fit(),
        before=judged.judge(Scaling.identity(judged.logits.shape[1])),
        after=judged.judge(fitted),
    )


def _quality(predicted: NDArray[np.float64], outcome: NDArray[np.float64]) -> Quality:
    return Quality(
        ece(predicted, outcome),
        auroc(predicted, outcome),
        brier(predicted, outcome),
        min(outcome.sum(), (1.0 - outcome).sum()) >= MIN_EACH,
        reliability_bins(predicted, outcome),
    )


def _plain(value: float) -> float | None:
    return None if np.isnan(value) else round(value, 5)


def _stack(records: Sequence[DraftRecord]) -> _Drafts:
    logits = [record.confidence_logits for record in records]
    if not logits or any(row is None for row in logits):
        raise ConfigError("only drafts of a drafter with a confidence head, of several prompts, can be used")
    return _Drafts(
        np.array(logits, dtype=np.float64),
        np.array([record.num_accepted for record in records], dtype=np.int64),
        np.array([record.num_verified for record in records], dtype=np.int64),
    )
