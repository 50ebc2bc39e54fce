"""The law of the output: chi-square of the joint law of three tokens, drafted by a random drafter.

The exact law comes from the target alone (every path enumerated, filters applied), the sample from
`Engine.step()` with many requests in one batch. The same test must fail when 2% of the mass is moved.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark_ray.core.types import SamplingParams
from dspark_ray.engine import acceptance, device_acceptance
from dspark_ray.engine.device_step import Decision, Launched
from dspark_ray.engine.engine import Engine
from dspark_ray.models.sampling import filtered_probs, sampling_rows
from dspark_ray.models.targets.decoder import Decoder
from tests.drafter_families import family_dir
from tests.reference import dense_logits
from tests.tiny_engine import (
    AHEAD,
    PATHS,
    on_path,
    request,
    run,
    steep_table,
    tiny_decoder,
    tiny_drafter_dir,
    tiny_engine,
)

VOCAB = 5
PROMPT = (1, 3, 2)
NUM_REQUESTS = 20_000
LENGTH = 3
SAMPLING = {"temperature": 1.0, "top_k": 4, "top_p": 0.97, "min_p": 0.02}
MODES = ("off", "fixed", "threshold", "algorithm1", "adaptive")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drafter_dir(tmp_path_factory.mktemp("drafter"), VOCAB, draft_vocab=(0, 1, 3, 4))


@pytest.fixture(scope="module")
def exact_law() -> np.ndarray:
    """[V, V, V] probability of each three-token output, from a plain engine's own logits."""
    target = tiny_decoder(VOCAB)
    law = np.zeros((VOCAB,) * LENGTH)
    for path in itertools.product(range(VOCAB), repeat=LENGTH):
        chance = 1.0
        for index, token in enumerate(path):
            chance *= next_probs(target, (*PROMPT, *path[:index]))[token]
        law[path] = chance
    return law


_CACHE: dict[tuple[int, ...], np.ndarray] = {}


def next_probs(target: Decoder, tokens: tuple[int, ...]) -> np.ndarray:
    """The filtered next-token distribution [V] after `tokens`."""
    if tokens not in _CACHE:
        rows = sampling_rows([SamplingParams(**SAMPLING)], VOCAB)
        logits = torch.from_numpy(dense_logits(target, tokens)[-1:])
        _CACHE[tokens] = filtered_probs(logits, rows)[0].double().numpy()
    return _CACHE[tokens]


def sample_counts(engine: Engine, num_requests: int = NUM_REQUESTS) -> np.ndarray:
    """How often each three-token beginning came out. [V, V, V]"""
    # Six tokens are asked for so that blocks are verified to their full length; three are counted.
    requests = [request(str(i), PROMPT, max_tokens=6, **SAMPLING) for i in range(num_requests)]
    counts = np.zeros((VOCAB,) * LENGTH)
    for tokens in run(engine, requests).values():
        counts[tuple(tokens[:LENGTH])] += 1
    return counts


def chi_square_z(counts: np.ndarray, law: np.ndarray) -> float:
    """Standardised chi-square statistic; rare cells are pooled. Above 4 the law is not the expected one."""
    expected = law.ravel() * counts.sum()
    observed = counts.ravel()
    assert observed[expected < 1e-9].sum() == 0, "a token came out that the target's filters exclude"
    common = expected >= 10
    observed = np.append(observed[common], observed[~common].sum())
    expected = np.append(expected[common], max(expected[~common].sum(), 1e-9))
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


def law_engine(checkpoint: Path, mode: str) -> Engine:
    return tiny_engine(
        checkpoint,
        vocab_size=VOCAB,
        table=steep_table(256),
        engine={"max_waiting": NUM_REQUESTS, "max_running": 128},
        speculation={"mode": mode, "threshold": 0.3},
    )


def note_binding_budgets(engine: Engine) -> list[bool]:
    """Of each step that is launched ahead: whether its budget is below what it could verify."""
    found: list[bool] = []
    if engine.ahead is not None:
        launch = engine.ahead._run

        def noted(decision: Decision, *rest: Any) -> Launched:
            found.append(decision.budget < decision.longest.sum())
            return launch(decision, *rest)

        engine.ahead._run = noted  # type: ignore[method-assign]
    return found


# The modes choose lengths, whoever chooses tokens.
@pytest.mark.parametrize(
    ("mode", "path"),
    [*((mode, "host") for mode in MODES), *itertools.product(("fixed", "adaptive"), ("device", AHEAD))],
)
def test_joint_law_is_the_targets(checkpoint: Path, exact_law: np.ndarray, mode: str, path: str) -> None:
    assert exact_law.sum() == pytest.approx(1.0, abs=1e-6)
    engine = on_path(path, law_engine(checkpoint, mode))
    binding = note_binding_budgets(engine)
    z = chi_square_z(sample_counts(engine), exact_law)
    counters = engine.counters
    if engine.ahead is not None:
        assert engine.ahead.num_launched >= counters.target_steps
        assert sum(binding) > 0.2 * len(binding)
    if mode != "off":
        assert counters.drafted_tokens > 0
        assert counters.accepted_tokens > 0
        assert counters.rejected_tokens > 0
    if engine.ahead is None and mode in ("threshold", "algorithm1", "adaptive"):
        assert counters.trimmed_tokens > counters.drafts  # more than the end of requests explains
    assert counters.drafted_tokens == counters.verified_tokens + counters.trimmed_tokens
    assert counters.verified_tokens == counters.accepted_tokens + counters.rejected_tokens
    assert abs(z) < 4, f"chi-square {z:.1f} standard deviations away"


@pytest.mark.parametrize("path", PATHS)
def test_joint_law_with_chances_that_are_learnt(tmp_path: Path, exact_law: np.ndarray, path: str) -> None:
    """A live estimator, with steps that verify in full for its sake, in the adaptive mode."""
    folder = family_dir(tmp_path, "eagle3", VOCAB, (0, 1, 3, 4))
    engine = tiny_engine(
        folder,
        vocab_size=VOCAB,
        engine={"max_waiting": NUM_REQUESTS, "max_running": 8},
        speculation={"mode": "adaptive", "drafter": {"kind": "eagle3", "path": str(folder)}},
    )
    z = chi_square_z(sample_counts(on_path(path, engine), 1_500), exact_law)
    counters = engine.counters
    assert counters.accepted_tokens > 0
    assert counters.rejected_tokens > 0
    assert counters.trimmed_tokens > counters.drafts / 3  # blocks are short, for little is worth verifying
    assert abs(z) < 4, f"chi-square {z:.1f} standard deviations away"


@pytest.mark.parametrize("path", PATHS)
def test_joint_law_with_prompt_look_up(exact_law: np.ndarray, path: str) -> None:
    engine = tiny_engine(None, vocab_size=VOCAB, engine={"max_waiting": NUM_REQUESTS, "max_running": 128})
    z = chi_square_z(sample_counts(on_path(path, engine)), exact_law)
    assert engine.counters.accepted_tokens > 0
    assert abs(z) < 4, f"chi-square {z:.1f} standard deviations away"


@pytest.mark.parametrize("path", [*PATHS, AHEAD])
def test_a_planted_bias_of_two_percent_is_found(
    checkpoint: Path, exact_law: np.ndarray, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2% of the draws replaced by the least likely token that is allowed fail at the same sample size."""
    plant_bias(path, monkeypatch)
    assert chi_square_z(sample_counts(on_path(path, law_engine(checkpoint, "fixed"))), exact_law) > 4


def plant_bias(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two percent, in the draw after the accepted tokens."""
    rng = np.random.default_rng(0)
    fair, fairly_accepted = acceptance.sample_from, device_acceptance.accept

    def cheat(weights: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        cheated = torch.from_numpy(rng.random(len(drawn)) < 0.02)
        return torch.where(cheated, torch.where(weights > 0, weights, 2.0).argmin(-1), drawn)

    def biased(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        return cheat(probs, fair(probs, uniforms))

    def biased_on_device(
        probs: torch.Tensor, drafted: torch.Tensor, row_start: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        counts, drawn = fairly_accepted(probs, drafted, row_start, *rest)
        return counts, cheat(probs[row_start[:-1].long() + counts], drawn)

    if path == "host":
        monkeypatch.setattr(acceptance, "sample_from", biased)
    else:
        monkeypatch.setattr(device_acceptance, "accept", biased_on_device)


def test_two_percent_of_moved_mass_is_found(checkpoint: Path, exact_law: np.ndarray) -> None:
    """A sample of the right law fails against a law that has 2% of the mass elsewhere.

    The mass goes from the likeliest to the least likely first token: over 4,000 simulated samples of this
    size the statistic is 12.0 standard deviations on average and never below 4.8. Between the two likeliest
    tokens it would be 7.1, and below 4 in one sample of 27.
    """
    first = exact_law.sum(axis=(1, 2))
    allowed = np.flatnonzero(first)
    top, least = allowed[first[allowed].argmax()], allowed[first[allowed].argmin()]
    moved = exact_law.copy()
    moved[top] *= 1 - 0.02 / first[top]
    moved[least] *= 1 + 0.02 / first[least]
    assert chi_square_z(sample_counts(law_engine(checkpoint, "adaptive")), moved) > 4
