"""The law of the output where rules remove half of what the drafter would draft, and with shared noise.

As `test_engine_law.py`: the exact law from the target alone, the sample from many requests in one batch.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark_ray.core.types import Request, SamplingParams
from dspark_ray.engine import acceptance
from dspark_ray.engine.engine import Engine
from dspark_ray.models.adjust import Columns
from dspark_ray.models.sampling import filtered_probs, sampling_rows
from dspark_ray.models.token_rules import token_rules
from tests.contract.test_engine_law import chi_square_z
from tests.reference import dense_logits
from tests.tiny_engine import (
    PATHS,
    on_path,
    request,
    run,
    steep_table,
    tiny_decoder,
    tiny_drafter_dir,
    tiny_engine,
)

VOCAB, LENGTH, NUM_REQUESTS = 6, 3, 1000
PROMPT = (1, 3, 2)
# The drafter knows 0, 1, 3 and 4. Two of them are forbidden at first, one for good and one until the third
# token; another only after itself. Token 2 can never be drafted.
RULES: dict[str, Any] = {
    "temperature": 1.2,
    "bad_words": ((3,), (1, 1)),
    "min_tokens": 2,
    "stop_token_ids": (4,),
    "logit_bias": ((5, -2.0),),  # a rare token, so that a planted bias shows in a small sample
}
PLAIN: dict[str, Any] = {"temperature": 1.0, "top_k": 5}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drafter_dir(tmp_path_factory.mktemp("drafter"), VOCAB, draft_vocab=(0, 1, 3, 4))


def exact_law(sampling: dict[str, Any]) -> np.ndarray:
    """[V, V, V] chance of each three-token output, from the target's dense logits and the rules."""
    target, params = tiny_decoder(VOCAB), SamplingParams(**sampling)
    law = np.zeros((VOCAB,) * LENGTH)
    known: dict[tuple[int, ...], np.ndarray] = {}

    def next_probs(text: tuple[int, ...]) -> np.ndarray:
        if text not in known:
            logits = torch.from_numpy(dense_logits(target, (*PROMPT, *text))[-1:])
            adjuster = token_rules(VOCAB, [])(Request("r", PROMPT, params))
            if adjuster is not None:
                adjuster.commit(text)
                adjuster.adjust(logits, [], Columns())
            known[text] = filtered_probs(logits, sampling_rows([params], VOCAB))[0].double().numpy()
        return known[text]

    for path in itertools.product(range(VOCAB), repeat=LENGTH):
        law[path] = np.prod([next_probs(path[:index])[token] for index, token in enumerate(path)])
    return law


@pytest.fixture(scope="module")
def constrained_law() -> np.ndarray:
    return exact_law(RULES)


def sample_counts(
    engine: Engine, sampling: dict[str, Any], *, count: int = NUM_REQUESTS, shared_noise: bool = False
) -> np.ndarray:
    """How often each three-token beginning came out; the same every time. [V, V, V]"""
    requests = [
        request(str(i), PROMPT, max_tokens=4, seed=i, shared_noise=shared_noise, **sampling)
        for i in range(count)
    ]
    counts = np.zeros((VOCAB,) * LENGTH)
    for tokens in run(engine, requests).values():
        counts[tuple(tokens[:LENGTH])] += 1
    return counts


def law_engine(checkpoint: Path | None, mode: str) -> Engine:
    return tiny_engine(
        checkpoint,
        vocab_size=VOCAB,
        table=steep_table(256),
        engine={"max_waiting": 2 * NUM_REQUESTS, "max_running": 128},
        speculation={"mode": mode, "threshold": 0.3},
    )


def check_drafts(engine: Engine) -> None:
    counters = engine.counters
    assert counters.accepted_tokens > 0
    assert counters.rejected_tokens > 0
    assert counters.drafted_tokens == counters.verified_tokens + counters.trimmed_tokens
    assert counters.verified_tokens == counters.accepted_tokens + counters.rejected_tokens


@pytest.mark.parametrize("path", PATHS)
def test_joint_law_under_rules(checkpoint: Path, constrained_law: np.ndarray, path: str) -> None:
    engine = on_path(path, law_engine(checkpoint, "adaptive"))
    z = chi_square_z(sample_counts(engine, RULES), constrained_law)
    check_drafts(engine)
    assert abs(z) < 4, f"chi-square {z:.1f} standard deviations away"


def test_joint_law_of_forbidden_proposals(constrained_law: np.ndarray) -> None:
    """Prompt look-up proposes whatever stood in the text: what is forbidden is rejected, never drawn from p
    as if it had not been there."""
    engine = law_engine(None, "fixed")
    z = chi_square_z(sample_counts(engine, RULES), constrained_law)
    check_drafts(engine)
    assert abs(z) < 4, f"chi-square {z:.1f} standard deviations away"


@pytest.mark.parametrize("path", PATHS)
def test_joint_law_over_seeds(checkpoint: Path, path: str) -> None:
    engine = on_path(path, law_engine(checkpoint, "adaptive"))
    z = chi_square_z(sample_counts(engine, PLAIN, shared_noise=True), exact_law(PLAIN))
    check_drafts(engine)
    assert abs(z) < 4, f"chi-square {z:.1f} standard deviations away"


def test_a_planted_bias_of_two_percent_is_found(
    constrained_law: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    fair, rng = acceptance.sample_from, np.random.default_rng(0)

    def biased(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        cheated = torch.from_numpy(rng.random(len(uniforms)) < 0.02)
        least = torch.where(probs > 0, probs, 2.0).argmin(-1)
        return torch.where(cheated, least, fair(probs, uniforms))

    monkeypatch.setattr(acceptance, "sample_from", biased)
    counts = sample_counts(law_engine(None, "fixed"), RULES, count=2 * NUM_REQUESTS)
    assert chi_square_z(counts, constrained_law) > 4
