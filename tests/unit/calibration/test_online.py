"""The online estimator on synthetic drafts whose law is known."""

import numpy as np
import pytest

from dspark_ray.calibration.online import LearnedDraft, OnlineEstimator, OnlineSettings
from dspark_ray.calibration.reliability import auroc, ece

GAMMA, FEATURES = 4, 3
SETTINGS = OnlineSettings(window=1024, min_drafts=32, refit_every=64)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def synthetic(count: int, seed: int, flip: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(features [N, γ, 3], chances [N, γ], accepted [N]); head, margin and entropy know a part each."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(count, GAMMA, FEATURES))
    features[..., 1] *= 5.0  # units differ
    logits = flip * (1.2 * features[..., 0] + 0.3 * features[..., 1] - 1.0 * features[..., 2])
    chances = sigmoid(logits + 0.5 - 0.3 * np.arange(GAMMA))
    accepted = (rng.random((count, GAMMA)) < chances).cumprod(axis=1).sum(axis=1)
    return features, chances, accepted


def trained(count: int = 1024, settings: OnlineSettings = SETTINGS) -> OnlineEstimator:
    estimator = OnlineEstimator(GAMMA, FEATURES, settings)
    for features, accepted in zip(*synthetic(count, 0)[::2], strict=True):
        estimator.learn(draft(features, int(accepted)))
    return estimator


def draft(features: np.ndarray, accepted: int, rule: str = "greedy") -> LearnedDraft:
    """The baseline is the head alone, read as a logit."""
    return LearnedDraft(rule, features, sigmoid(features[:, 0]), len(features), accepted)


def predict(estimator: OnlineEstimator, features: np.ndarray, rule: str = "greedy") -> np.ndarray:
    return estimator.predict(features, sigmoid(features[..., 0]), [rule] * len(features))


def test_beats_head_and_margin_alone_and_is_calibrated() -> None:
    features, chances, accepted = synthetic(4000, 1)
    estimator = trained(4000, OnlineSettings(window=4000, min_drafts=32, refit_every=1000))
    predicted = predict(estimator, features)
    for k in range(GAMMA):
        reached = accepted >= k
        labels = (accepted[reached] > k).astype(float)
        ours = auroc(predicted[reached, k], labels)
        assert ours > auroc(sigmoid(features[reached, k, 0]), labels) + 0.05
        assert ours > auroc(sigmoid(features[reached, k, 1]), labels) + 0.05
        assert ours > auroc(chances[reached, k], labels) - 0.01  # nothing can do better than the law
        assert ece(predicted[reached, k], labels) < 0.06


def test_shorter_blocks_can_be_learnt_and_predicted() -> None:
    estimator = trained()
    features, _, accepted = synthetic(200, 2)
    for row, count in zip(features, accepted, strict=True):
        estimator.learn(draft(row[:2], min(int(count), 2)))
    assert predict(estimator, features[:, :2]).shape == (200, 2)
    full = predict(estimator, features)
    np.testing.assert_allclose(full[:, :2], predict(estimator, features[:, :2]))


def test_until_it_has_proved_itself_the_baseline_is_used() -> None:
    features, _, _ = synthetic(10, 3)
    fresh = OnlineEstimator(GAMMA, FEATURES, SETTINGS)
    np.testing.assert_array_equal(predict(fresh, features), sigmoid(features[..., 0]))
    np.testing.assert_array_equal(predict(trained(31), features), sigmoid(features[..., 0]))
    assert (predict(trained(), features, "rejection") == sigmoid(features[..., 0])).all()  # another rule's


def test_falls_back_when_the_world_changes() -> None:
    """Acceptance turns round: the fit is worse than the baseline until it has relearnt, and is not used."""
    settings = OnlineSettings(window=1024, min_drafts=32, refit_every=10_000)
    estimator = trained(1024, OnlineSettings(window=1024, min_drafts=32, refit_every=512))
    for model in estimator._models.values():
        model._settings = settings  # no further refit
    assert estimator._models["greedy"].trusted.all()
    features, _, accepted = synthetic(600, 4, flip=-1.0)
    for row, count in zip(features, accepted, strict=True):
        constant = LearnedDraft("greedy", row, np.full(GAMMA, 0.5), GAMMA, int(count))
        estimator.learn(constant)
    assert not estimator._models["greedy"].trusted[:2].any()


def test_memory_is_bounded() -> None:
    estimator = trained(300, OnlineSettings(window=100, min_drafts=32))
    assert estimator._models["greedy"].num_drafts == 100


@pytest.mark.parametrize("accepted", [0, GAMMA])
def test_equal_labels_stay_finite(accepted: int) -> None:
    estimator = OnlineEstimator(GAMMA, FEATURES, SETTINGS)
    features, _, _ = synthetic(200, 5)
    for row in features:
        estimator.learn(draft(row, accepted))
    chances = predict(estimator, features)
    assert np.isfinite(chances).all()
    assert (chances[:, 0] < 0.1).all() if accepted == 0 else (chances > 0.9).all()


def test_exploration_is_decided_by_counts_alone() -> None:
    fresh = OnlineEstimator(GAMMA, FEATURES, SETTINGS)
    assert all(fresh.explores(step) for step in range(5))
    steps = [step for step in range(64) if trained(64).explores(step)]
    assert steps == [0, 16, 32, 48]
