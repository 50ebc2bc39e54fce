"""A drafter's confidences: which scaling each rule's requests get, and what is said where one is missing."""

import logging
from pathlib import Path

import numpy as np
import pytest

from dspark_ray.calibration.temperatures import Temperatures
from dspark_ray.core.errors import ArtefactError
from dspark_ray.core.types import AcceptanceRule
from dspark_ray.models.drafters.confidence import TEMPERATURES_FILE, drafter_digest, load_confidence

LOGITS = np.array([[1.0, -2.0, 0.5]] * 3, dtype=np.float32)
RULES = (AcceptanceRule.GREEDY, AcceptanceRule.REJECTION, AcceptanceRule.SHARED_NOISE)


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def write(drafter: Path, rules: dict[str, float], digest: str | None = None) -> Path:
    """A constant temperature a rule, and an offset of a tenth of it."""
    by_rule = {rule: np.full(3, value) for rule, value in rules.items()}
    offsets = {rule: np.full(3, value / 10) for rule, value in rules.items()}
    path = drafter / TEMPERATURES_FILE
    Temperatures(by_rule, {"drafter": digest or drafter_digest(drafter)}, offsets).save(path)
    return path


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def test_each_rule_has_its_own(drafter: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(drafter, {"greedy": 1.0, "rejection": 2.0, "shared_noise": 3.0})
    confidence = load_confidence(drafter, None, 3)
    expected = np.stack([sigmoid(row / t + t / 10) for row, t in zip(LOGITS, (1, 2, 3), strict=True)])
    np.testing.assert_allclose(confidence(LOGITS, RULES), expected, rtol=1e-6)
    np.testing.assert_allclose(confidence(LOGITS[:, :2], RULES), expected[:, :2], rtol=1e-6)
    assert not caplog.records
    assert confidence.source == f"calibrated ({TEMPERATURES_FILE})"


def test_shared_noise_takes_those_of_rejection_and_says_so(
    drafter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(drafter, {"greedy": 1.0, "rejection": 2.0})
    found = load_confidence(drafter, None, 3)(LOGITS, RULES)
    np.testing.assert_array_equal(found[2], found[1])
    assert "no temperatures for shared_noise: those of rejection are used" in caplog.text


def test_a_rule_without_any_is_used_as_it_is_and_named(
    drafter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(drafter, {"rejection": 2.0, "shared_noise": 3.0})
    found = load_confidence(drafter, None, 3)(LOGITS, RULES)
    np.testing.assert_allclose(found[0], sigmoid(LOGITS[0]), rtol=1e-6)
    assert "no temperatures for greedy: T = 1 is used" in caplog.text


def test_temperatures_of_another_drafter(drafter: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Named ones are refused; those that a drafter was trained away from are left alone, loudly."""
    path = write(drafter, {"greedy": 2.0, "rejection": 2.0, "shared_noise": 2.0}, "another")
    with pytest.raises(ArtefactError, match=r"drafter=another.*calibrate again"):
        load_confidence(drafter, str(path), 3)
    confidence = load_confidence(drafter, None, 3)
    np.testing.assert_allclose(confidence(LOGITS, RULES), sigmoid(LOGITS), rtol=1e-6)
    assert confidence.source == "uncalibrated"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "drafter=another" in record.getMessage()


def test_too_few_positions_are_refused(drafter: Path) -> None:
    path = write(drafter, {"greedy": 2.0})
    with pytest.raises(ArtefactError, match="3 positions, the drafter has 4"):
        load_confidence(drafter, str(path), 4)


def test_without_a_file_confidences_are_uncalibrated(drafter: Path, caplog: pytest.LogCaptureFixture) -> None:
    np.testing.assert_allclose(load_confidence(drafter, None, 3)(LOGITS, RULES), sigmoid(LOGITS), rtol=1e-6)
    assert "uncalibrated" in caplog.text
