"""The equality check finds what is planted, excuses near-ties only, and doubts what proves nothing."""

from pathlib import Path

import pytest
import torch

from dspark_ray.engine.scoring import teacher_forced_logits
from dspark_ray.profiling.equality import Difference, ModeReport, check_equality
from tests.tiny_engine import request, run, tiny_decoder, tiny_drafter_dir, tiny_engine

PROMPTS = [[1, 2, 3], [4, 4], [2], [3, 1, 4, 1]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drafter_dir(tmp_path_factory.mktemp("drafter"), 5, draft_vocab=None)


def check(**others):
    plain = tiny_engine(None, speculation={"mode": "off"})
    return {r.mode: r for r in check_equality(plain, others, PROMPTS, max_tokens=40, concurrency=4)}


def test_every_mode_is_equal(checkpoint: Path) -> None:
    modes = ("fixed", "threshold", "algorithm1", "adaptive")
    reports = check(**{mode: tiny_engine(checkpoint, speculation={"mode": mode}) for mode in modes})
    for mode, report in reports.items():
        assert report.verdict == "equal", (mode, report)
        assert report.num_tokens == 40 * len(PROMPTS)


def test_another_text_is_different(checkpoint: Path) -> None:
    wrong = tiny_engine(checkpoint, target=tiny_decoder(5, seed=9))
    report = check(fixed=wrong)["fixed"]
    assert report.verdict == "DIFFERENT"
    assert report.differences[0].logit_gap is not None
    assert not report.differences[0].excused


def test_a_text_that_ends_early_is_different(checkpoint: Path) -> None:
    short = tiny_engine(checkpoint, eos_token_ids=(0, 1, 2, 3, 4))
    report = check(fixed=short)["fixed"]
    assert report.verdict == "DIFFERENT"
    assert report.differences[0].found is None


def test_a_near_tie_is_excused(checkpoint: Path) -> None:
    plain = tiny_engine(None, speculation={"mode": "off"})
    other = {"fixed": tiny_engine(checkpoint, target=tiny_decoder(5, seed=9))}
    (report,) = check_equality(plain, other, PROMPTS, max_tokens=4, concurrency=4, tolerance=1e9)
    assert report.differences
    assert report.equal


def test_nothing_drafted_proves_nothing() -> None:
    report = check(fixed=tiny_engine(None, speculation={"mode": "off"}))["fixed"]
    assert report.verdict == "INCONCLUSIVE"
    assert "nothing was drafted" in report.doubts


def test_adaptive_must_trim_with_several_budgets() -> None:
    report = ModeReport("adaptive", 1, 10, drafted=5, accepted=2, trimmed=0, distinct_budgets=2)
    assert report.doubts == ["nothing was trimmed", "fewer than 3 budgets"]


def test_a_difference_without_a_gap_is_never_excused() -> None:
    difference = Difference(0, 3, None, 2, logit_gap=None, excused=False)
    report = ModeReport("fixed", 1, 10, 5, 2, 0, 2, [difference])
    assert report.verdict == "DIFFERENT"


def test_teacher_forcing_agrees_with_generation() -> None:
    engine = tiny_engine(None, speculation={"mode": "off"})
    prompt = [1, 2, 3]
    output = run(engine, [request("a", prompt, temperature=0.0, max_tokens=20)])["a"]
    logits = teacher_forced_logits(engine.target, [*prompt, *output[:-1]], len(prompt) - 1)
    assert logits.dtype == torch.float32
    assert logits.argmax(dim=1).tolist() == output
