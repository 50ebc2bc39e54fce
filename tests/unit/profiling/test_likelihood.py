"""Fair texts pass on both figures, and a drafter that lies about its probabilities fails on both."""

from pathlib import Path

import numpy as np
import pytest

from dspark_ray.core.types import SpeculationCounters
from dspark_ray.engine.engine import Engine
from dspark_ray.profiling.likelihood import LyingDrafter, TextScores, judge, score_texts
from tests.reference import dense_logits
from tests.tiny_engine import request, run, tiny_decoder, tiny_drafter_dir, tiny_engine

PROMPTS = [[1, 2, 3], [4, 4], [2], [3, 1, 4, 1]]
SAMPLES = 30


def scores(engine: Engine, first_seed: int) -> TextScores:
    items = [
        request(
            f"{prompt} {sample}",
            prompt,
            temperature=1.0,
            seed=first_seed + sample,
            shared_noise=False,
            max_tokens=12,
        )
        for prompt in PROMPTS
        for sample in range(SAMPLES)
    ]
    texts = run(engine, items)
    answers = [[texts[f"{prompt} {sample}"] for sample in range(SAMPLES)] for prompt in PROMPTS]
    return score_texts(engine.target, PROMPTS, answers)


@pytest.fixture(scope="module")
def plain() -> tuple[TextScores, TextScores]:
    engine = tiny_engine(None, speculation={"mode": "off"})
    return scores(engine, 0), scores(engine, 1000)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drafter_dir(tmp_path_factory.mktemp("drafter"), 5, draft_vocab=None)


@pytest.mark.parametrize("mode", ["fixed", "adaptive"])
def test_fair_texts_pass(checkpoint: Path, plain: tuple[TextScores, TextScores], mode: str) -> None:
    engine = tiny_engine(checkpoint, speculation={"mode": mode}, engine={"max_running": 4})
    result = judge(mode, scores(engine, 2000), *plain, engine.counters)
    assert result.accepted > 0
    assert result.agrees
    assert result.is_fair


def test_a_lie_about_q_fails(checkpoint: Path, plain: tuple[TextScores, TextScores]) -> None:
    engine = tiny_engine(checkpoint, speculation={"mode": "fixed"}, engine={"max_running": 16})
    assert engine.drafter is not None
    engine.drafter = LyingDrafter(engine.drafter)
    result = judge("lying", scores(engine, 2000), *plain, engine.counters)
    assert not result.agrees
    assert not result.is_fair


def test_the_figures_of_a_text() -> None:
    """Against their definitions, from dense logits."""
    target, prompt, text = tiny_decoder(5), [1, 2], [3, 0, 4]
    logits = dense_logits(target, (*prompt, *text))[len(prompt) - 1 : -1].astype(np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = logp[range(3), text]
    found = score_texts(target, [prompt], [[text]])
    assert found.logprobs.item() == pytest.approx(chosen.mean(), abs=1e-5)
    entropy = -(np.exp(logp) * logp).sum(-1)
    assert found.surplus.item() == pytest.approx((chosen + entropy).mean(), abs=1e-5)


def test_the_interval_is_that_of_two_runs_of_plain_decoding() -> None:
    """Two samples of variance 2 for each of three prompts: the mean of six has variance 1/3."""
    spread = TextScores(np.array([[0.0, 2.0], [5.0, 7.0], [1.0, 3.0]]), np.array([[-1.0, 1.0]] * 3))
    result = judge("off", spread, spread, spread, SpeculationCounters(1))
    assert result.interval == pytest.approx(1.959964 * (2 / 3) ** 0.5)
    assert (result.difference, result.surplus_z) == (0.0, 0.0)
