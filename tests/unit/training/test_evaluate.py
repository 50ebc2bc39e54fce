"""Evaluation counts what the engine counts; calibration recovers known temperatures."""

from pathlib import Path

import numpy as np
import pytest

from dspark_ray.core.errors import ConfigError
from dspark_ray.core.types import SamplingParams
from dspark_ray.engine.draft_log import DraftRecord
from dspark_ray.training.calibrate import calibrate
from dspark_ray.training.evaluate import count_positions, evaluate
from tests.tiny_engine import tiny_drafter_dir, tiny_engine

PROMPTS = [[1, 2, 3], [4, 4], [2], [3, 1, 4, 1]]


def record(
    num_verified: int, num_accepted: int, logits: np.ndarray | None = None, name: str = "a"
) -> DraftRecord:
    return DraftRecord(name, True, logits, num_verified, num_accepted)


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


def overconfident(num_blocks: int, temperature: float, seed: int) -> list[DraftRecord]:
    """Logits `temperature` times as large as they should be."""
    rng = np.random.default_rng(seed)
    honest = rng.normal(0.5, 1.5, size=(num_blocks, 4))
    stands = rng.random(honest.shape) < 1 / (1 + np.exp(-honest))
    accepted = np.cumprod(stands, axis=1).sum(axis=1)
    return [
        record(4, int(accepted[n]), (honest[n] * temperature).astype(np.float32), f"prompt-{n % 30}")
        for n in range(num_blocks)
    ]


def test_known_temperatures_are_found() -> None:
    records = {"greedy": overconfident(6000, 2.0, 0), "rejection": overconfident(6000, 3.0, 1)}
    temperatures, reports = calibrate(records, {"drafter": "x"})
    assert temperatures.for_rule("greedy")[0] == pytest.approx(2.0, rel=0.2)
    assert temperatures.for_rule("rejection")[0] == pytest.approx(3.0, rel=0.2)
    assert temperatures.made_from == {"drafter": "x", "drafts": {"greedy": 6000, "rejection": 6000}}
    for report in reports:
        assert np.mean(report.ece_after) < 0.5 * np.mean(report.ece_before)


def test_too_few_drafts() -> None:
    with pytest.raises(ConfigError, match="too few"):
        calibrate({"greedy": overconfident(10, 1.0, 0)}, {})


def test_drafts_without_confidences() -> None:
    with pytest.raises(ConfigError, match="confidence head"):
        calibrate({"greedy": [record(4, 1, None, f"p{n}") for n in range(300)]}, {})
