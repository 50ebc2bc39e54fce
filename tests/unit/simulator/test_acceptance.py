"""Blocks of a model and of a record: what they say of acceptance is what they do."""

from pathlib import Path

import numpy as np
import pytest

from dspark_ray.core.errors import ArtefactError
from dspark_ray.core.step_record import RecordedDraft, RecordedStep, header
from dspark_ray.simulator.acceptance import (
    AcceptanceBank,
    AcceptanceModel,
    Blocks,
    conditional_acceptance,
    modelled_blocks,
    recorded_blocks,
)

CONDITIONAL = (0.8, 0.6, 0.5, 0.7)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def write(path: Path, *drafts: RecordedDraft) -> Path:
    steps = [RecordedStep(1.0 * n, 1.0, 1.0, 3, 1, d.verified, 1, 10, (d,)) for n, d in enumerate(drafts)]
    path.write_text("\n".join([header(), *(step.to_line() for step in steps)]) + "\n")
    return path


def test_a_models_blocks_have_its_acceptance() -> None:
    blocks = modelled_blocks(AcceptanceModel(CONDITIONAL, spread=1.5), rng(), 20_000)
    assert conditional_acceptance(blocks) == pytest.approx(CONDITIONAL, abs=0.03)


@pytest.mark.parametrize(("scale", "sign"), [(1.0, 0), (2.5, 1)])
def test_confidences_are_calibrated_unless_said_otherwise(scale: float, sign: int) -> None:
    model = AcceptanceModel((0.8, 0.8), spread=1.5, confidence_scale=scale)
    blocks = modelled_blocks(model, rng(), 20_000)
    high = blocks.survival[:, 0] > 0.9
    stood = float((blocks.accepted[high] >= 1).mean())
    promised = float(blocks.survival[high, 0].mean())
    assert (promised - stood > 0.02) == bool(sign)
    assert abs(promised - stood) < 0.02 or sign


def test_blocks_of_a_request_resemble_each_other() -> None:
    def correlation(persistence: float) -> float:
        scores = modelled_blocks(AcceptanceModel((0.6,), 2.0, persistence), rng()).survival[:, 0]
        return float(np.corrcoef(scores[:-1], scores[1:])[0, 1])

    assert correlation(0.9) > 0.3
    assert abs(correlation(0.0)) < 0.05


def test_requests_walk_through_their_own_task() -> None:
    def task(size: int, accepted: int) -> Blocks:
        return Blocks(np.full((size, 2), 0.5, np.float32), np.full(size, accepted))

    bank = AcceptanceBank([task(3, 0), task(4, 2)])
    tasks = np.array([0, 1, 1])
    places = bank.start(tasks, rng())
    for _ in range(6):
        assert bank.accepted[places].tolist() == [0, 2, 2]
        places = bank.next(places, tasks)


def test_a_record_is_read_request_by_request(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.jsonl",
        RecordedDraft(1, "greedy", (0.9, 0.5), 2, 1),
        RecordedDraft(0, "greedy", (0.8, 0.4), 2, 2),
        RecordedDraft(1, "greedy", (0.7,), 1, 1),
    )
    blocks = recorded_blocks([path], 3, rng())
    assert blocks.survival[:, 0].tolist() == pytest.approx([0.8, 0.9, 0.7])
    assert blocks.accepted.tolist() == [2, 1, 1]
    assert blocks.survival[2].tolist() == pytest.approx([0.7, 0.0, 0.0])


def test_trimmed_drafts_are_completed_by_their_confidences(tmp_path: Path) -> None:
    known = [RecordedDraft(0, "greedy", (0.9, 0.9), 2, 2)] * 9
    certain = recorded_blocks(
        [write(tmp_path / "a.jsonl", *known, RecordedDraft(0, "greedy", (1.0, 1.0), 1, 1))], 2, rng()
    )
    hopeless = recorded_blocks(
        [write(tmp_path / "b.jsonl", *known, RecordedDraft(0, "greedy", (1.0, 0.0), 1, 1))], 2, rng()
    )
    assert (certain.accepted[-1], hopeless.accepted[-1]) == (2, 1)


def test_a_record_of_trimmed_drafts_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", *[RecordedDraft(0, "greedy", (0.9, 0.5), 1, 1)] * 5)
    with pytest.raises(ArtefactError, match="mode fixed"):
        recorded_blocks([path], 2, rng())


def test_a_record_without_drafts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match="holds no drafts"):
        recorded_blocks([write(tmp_path / "r.jsonl")], 2, rng())
