"""Chances of acceptance learnt while serving, from what became of past drafts.

For each acceptance rule and block position k a logistic regression gives the chance that token k is accepted,
given that all before it were. Its features are functions of the draft distribution at k (top-2 margin,
entropy) and the confidence head's logit where there is one; never of the drawn token itself, so that
verification stays lossless (docs/method.md). Labels come only from drafts that were verified in full because
it was their turn, not because they scored well: outcomes of trimmed drafts are selected by the scores.

Cost is bounded: the latest `window` drafts of a rule are kept, and every `refit_every` new ones take a few
Newton steps over them. A fit is only believed while it predicts new outcomes, before it learns from them,
better than the baseline does (the calibrated head, or the plain rate of each position); else the baseline is
used.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_ray.calibration.sts import survival_outcomes

Float64Array = NDArray[np.float64]

_CLIP = 1e-4  # probabilities stay this far from 0 and 1 in the running losses
_MAX_LOGIT = 30.0


@dataclass(frozen=True, slots=True)
class OnlineSettings:
    """How much is remembered and how often it is used."""

    window: int = 2048  # drafts of one rule that a fit is made from
    min_drafts: int = 64  # fewer than this: the baseline
    refit_every: int = 64  # drafts
    ridge: float = 1.0  # pull of the weights towards 0, in drafts; the intercept is free
    newton_steps: int = 6
    forget: float = 0.995  # of the running losses, per draft
    explore_every: int = 16  # one step in so many is verified in full, once `min_drafts` are known


@dataclass(frozen=True, slots=True)
class LearnedDraft:
    """One draft that was verified in full, with what was predicted for it."""

    rule: str
    features: Float64Array  # [n, F]
    baseline: Float64Array  # [n] the baseline's chances
    num_verified: int
    num_accepted: int


class PositionModels:
    """The logistic regressions of one rule, one a position, and how well they have been doing."""

    def __init__(self, block_size: int, num_features: int, settings: OnlineSettings) -> None:
        self._settings = settings
        self._drafts: deque[LearnedDraft] = deque(maxlen=settings.window)
        self._weights = np.zeros((block_size, num_features + 1))  # intercept last
        self._mean, self._scale = np.zeros(num_features), np.ones(num_features)
        self._fitted = np.zeros(block_size, dtype=bool)
        self._loss = np.zeros((2, block_size))  # running log loss of the model and of the baseline
        self._seen = np.zeros(block_size)
        self._since_fit = 0

    @property
    def num_drafts(self) -> int:
        return len(self._drafts)

    @property
    def trusted(self) -> NDArray[np.bool_]:
        """[γ] positions where the fit has lately been better than the baseline."""
        better: NDArray[np.bool_] = self._fitted & (self._seen > 0) & (self._loss[0] < self._loss[1])
        return better

    def predict(self, features: Float64Array) -> Float64Array:
        """features [R, n, F] → chances [R, n]"""
        n = features.shape[1]
        inputs = _with_intercept((features - self._mean) / self._scale)
        logits = np.einsum("rnf,nf->rn", inputs, self._weights[:n])
        return _sigmoid(logits)

    def learn(self, draft: LearnedDraft) -> None:
        """Judges the present fit by the draft, then takes it in."""
        n = len(draft.features)
        survived, _ = survival_outcomes([draft.num_accepted], [draft.num_verified], n)
        tried = min(draft.num_accepted + 1, draft.num_verified, n)
        labels = survived[0, :tried].astype(np.float64)
        predicted = self.predict(draft.features[None, :tried])[0]
        for row, chances in enumerate((predicted, draft.baseline[:tried])):
            self._loss[row, :tried] *= self._settings.forget
            self._loss[row, :tried] += _log_loss(chances, labels)
        judged = self._fitted[:tried]
        self._loss[:, :tried] *= judged  # before the first fit there is nothing to judge
        self._seen[:tried] = (self._seen[:tried] * self._settings.forget + 1.0) * judged
        self._drafts.append(draft)
        self._since_fit += 1
        if len(self._drafts) >= self._settings.min_drafts and self._since_fit >= self._settings.refit_every:
            self._refit()
            self._since_fit = 0

    def _refit(self) -> None:
        width = max(len(d.features) for d in self._drafts)
        accepted = np.array([d.num_accepted for d in self._drafts])
        verified = np.array([d.num_verified for d in self._drafts])
        stacked = np.zeros((len(self._drafts), width, self._mean.shape[0]))
        for row, draft in enumerate(self._drafts):
            stacked[row, : len(draft.features)] = draft.features
        reached = np.arange(width) < np.minimum(accepted + 1, verified)[:, None]
        rows = stacked[reached]
        self._rescale(rows.mean(axis=0), rows.std(axis=0) + 1e-6)
        inputs = _with_intercept((stacked - self._mean) / self._scale)
        for k in range(width):
            tried = reached[:, k]
            if tried.any():
                labels = (accepted[tried] > k).astype(np.float64)
                self._weights[k] = _fit_logistic(inputs[tried, k], labels, self._weights[k], self._settings)
                self._fitted[k] = True

    def _rescale(self, mean: Float64Array, scale: Float64Array) -> None:
        """New units for the features, with the weights that say the same in them: positions without new
        labels keep their fit."""
        slopes = self._weights[:, :-1] / self._scale
        self._weights[:, -1] += slopes @ (mean - self._mean)
        self._weights[:, :-1] = slopes * scale
        self._mean, self._scale = mean, scale


class OnlineEstimator:
    """All rules' models behind one `predict` and one `learn`."""

    def __init__(self, block_size: int, num_features: int, settings: OnlineSettings | None = None) -> None:
        self.settings = settings or OnlineSettings()
        self._block_size, self._num_features = block_size, num_features
        self._models: dict[str, PositionModels] = {}

    def predict(self, features: Float64Array, baseline: Float64Array, rules: Sequence[str]) -> Float64Array:
        """Chances of each position of R drafts. features [R, n, F], baseline [R, n], rules [R] → [R, n]"""
        chances = np.array(baseline, dtype=np.float64)
        for rule in set(rules):
            model = self._models.get(rule)
            if model is not None:
                rows = np.array([name == rule for name in rules])
                trusted = model.trusted[: features.shape[1]]
                chances[np.ix_(rows, trusted)] = model.predict(features[rows])[:, trusted]
        return chances

    def learn(self, draft: LearnedDraft) -> None:
        """Takes in a draft that was verified in full for the purpose."""
        if draft.rule not in self._models:
            self._models[draft.rule] = PositionModels(self._block_size, self._num_features, self.settings)
        self._models[draft.rule].learn(draft)

    def explores(self, step: int) -> bool:
        """Whether step number `step` should verify whole drafts: always at first, later one in so many.

        Decided from the number of drafts learnt and of steps alone: never from a draft's own score.
        """
        learnt = sum(model.num_drafts for model in self._models.values())
        return learnt < self.settings.min_drafts or step % self.settings.explore_every == 0

    def describe(self) -> str:
        """How many positions each rule's fit is used at."""
        used = [f"{rule} {int(model.trusted.sum())}" for rule, model in sorted(self._models.items())]
        return f"positions in use: {', '.join(used) or 'none yet'}"


def _fit_logistic(
    inputs: Float64Array, labels: Float64Array, start: Float64Array, settings: OnlineSettings
) -> Float64Array:
    """Newton's method for the ridge-penalised log loss. inputs [N, F + 1], labels [N] → [F + 1]"""
    penalty = np.full(inputs.shape[1], settings.ridge)
    penalty[-1] = 1e-2  # all labels equal: the intercept stays finite
    weights = start.copy()
    for _ in range(settings.newton_steps):
        chances = _sigmoid(inputs @ weights)
        gradient = inputs.T @ (chances - labels) + penalty * weights
        curvature = (inputs * (chances * (1.0 - chances))[:, None]).T @ inputs + np.diag(penalty)
        step = np.linalg.solve(curvature, gradient)
        weights -= step / max(1.0, float(np.abs(step).max()) / 4.0)  # far from the optimum Newton overshoots
    return weights


def _log_loss(chances: Float64Array, labels: Float64Array) -> Float64Array:
    clipped = np.clip(chances, _CLIP, 1.0 - _CLIP)
    return np.asarray(-(labels * np.log(clipped) + (1.0 - labels) * np.log(1.0 - clipped)))


def _with_intercept(features: Float64Array) -> Float64Array:
    return np.concatenate((features, np.ones((*features.shape[:-1], 1))), axis=-1)


def _sigmoid(x: Float64Array) -> Float64Array:
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(x, -_MAX_LOGIT, _MAX_LOGIT))))
