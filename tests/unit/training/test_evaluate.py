"""Evaluation counts what the engine counts; calibration recovers known temperatures."""

from pathlib import Path

import numpy as np
import pytest

from dspark_ray.core.errors import ConfigError
from dspark_ray.core.types import AcceptanceRule, SamplingParams
from dspark_ray.engine.draft_log import DraftRecord
from dspark_ray.training.calibrate import calibrate
from dspark_ray.training.evaluate import count_positions, evaluate
from tests.tiny_engine import tiny_drafter_dir, tiny_engine

PROMPTS = [[1, 2, 3], [4, 4], [2], [3, 1, 4, 1]]


def record(
    num_verified: int,
    num_accepted: int,
    logits: np.ndarray | None = None,
    name: str = "a",
    rule: AcceptanceRule = AcceptanceRule.GREEDY,
) -> DraftRecord:
    return DraftRecord(name, rule, logits, num_verified, num_accepted)


def test_positions_are_tried_after_an_accepted_one() -> None:
    tried, accepted = count_positions([record(4, 0), record(4, 2), record(2, 2), record(0, 0)], 4)
    assert tried.tolist() == [3, 2, 1, 0]
    assert accepted.tolist() == [2, 2, 0, 0]


def test_no_records() -> None:
    tried, accepted = count_positions([], 3)
    assert tried.tolist() == accepted.tolist() == [0, 0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_evaluation_agrees_with_the_counters(tmp_path: Path, temperature: float) -> None:
    engine = tiny_engine(tiny_drafter_dir(tmp_path, 5, draft_vocab=None))
    sampling = SamplingParams(temperature=temperature, max_tokens=30, seed=3)
    result = evaluate(engine, PROMPTS, sampling, concurrency=2)
    counters = result.run.counters
    assert result.tau == counters.tau > 1
    assert result.accepted.tolist() == counters.accepted_per_position
    assert result.report()["output_tokens"] == 30 * len(PROMPTS)
    assert engine.draft_log is None
    rates = result.conditional_acceptance
    assert rates[0] == result.accepted[0] / result.tried[0]
    assert all(rate is None or 0 <= rate <= 1 for rate in rates)


def test_a_refused_prompt_is_reported() -> None:
    result = evaluate(tiny_engine(None), [[1] * 300, [1, 2]], SamplingParams(max_tokens=4), concurrency=1)
    assert result.report()["refused_prompts"] == 1


def wrong_by(
    temperature: float, offset: float, rule: AcceptanceRule = AcceptanceRule.GREEDY, num_blocks: int = 6000
) -> list[DraftRecord]:
    """Logits `temperature` times as large as they should be, and then too small by `offset` × that."""
    rng = np.random.default_rng(num_blocks + int(10 * temperature))
    honest = rng.normal(0.5, 1.5, size=(num_blocks, 4))
    stands = rng.random(honest.shape) < 1 / (1 + np.exp(-honest))
    accepted = np.cumprod(stands, axis=1).sum(axis=1)
    logits = ((honest - offset) * temperature).astype(np.float32)
    return [record(4, int(accepted[n]), logits[n], f"prompt-{n % 30}", rule) for n in range(num_blocks)]


WRONG = {"greedy": (2.0, 0.0), "rejection": (3.0, -0.5), "shared_noise": (0.5, -1.0)}


def test_each_rule_is_fitted_on_its_own_outcomes() -> None:
    records = {rule: wrong_by(*wrong, AcceptanceRule(rule)) for rule, wrong in WRONG.items()}
    temperatures, reports = calibrate(records, {"drafter": "x"})
    for rule, (temperature, offset) in WRONG.items():
        scaling = temperatures.scaling(rule)
        assert scaling.temperatures[0] == pytest.approx(temperature, rel=0.2)
        assert scaling.offsets[0] == pytest.approx(offset, abs=0.15)
    assert temperatures.made_from == {"drafter": "x", "drafts": dict.fromkeys(WRONG, 6000)}
    for report in reports:
        before, after = report.mean_ece
        assert after < 0.5 * before
        assert after == pytest.approx(np.mean([quality.ece for quality in report.after]))
        assert report.auroc_move < 0.02
        assert report.as_json()["offsets"] == report.scaling.offsets.tolist()


def test_outcomes_of_another_rule_are_refused() -> None:
    with pytest.raises(ConfigError, match="'rejection' can only be calibrated on its own outcomes"):
        calibrate({"rejection": wrong_by(1.0, 0.0)}, {})


def test_too_few_drafts() -> None:
    with pytest.raises(ConfigError, match="too few"):
        calibrate({"greedy": wrong_by(1.0, 0.0, num_blocks=10)}, {})


def test_drafts_without_confidences() -> None:
    with pytest.raises(ConfigError, match="confidence head"):
        calibrate({"greedy": [record(4, 1, None, f"p{n}") for n in range(300)]}, {})
