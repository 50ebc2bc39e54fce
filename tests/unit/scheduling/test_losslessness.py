"""The exact output law of one draft / verify step, by enumeration: does a length rule keep the target's?

Two tokens in the vocabulary, so every draft of every request can be tried. A step drafts γ tokens a
request from q, asks the rule how many to verify, accepts left to right, draws from the residual or from p,
and continues with p alone to γ + 1 tokens. The law of what comes out must be p's, jointly over requests.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from dspark_ray.scheduling.lengths import LENGTH_RULES, LengthDecision, LengthView, throughput
from dspark_ray.scheduling.survival import admit_top, rank_tokens, survival

Rule = Callable[[LengthView], LengthDecision]
Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Toy:
    """One request: laws of the next token and confidences, each a function of the tokens before it."""

    block: int
    p: Callable[[Prefix], np.ndarray]  # target, [2]
    q: Callable[[Prefix], np.ndarray]  # drafter, [2]
    confidence: Callable[[Prefix], float]  # of the token after the prefix

    def draft_law(self, draft: Prefix) -> float:
        return float(np.prod([self.q(draft[:k])[draft[k]] for k in range(self.block)]))

    def confidences(self, draft: Prefix) -> list[float]:
        return [self.confidence(draft[:k]) for k in range(self.block)]

    def target_law(self) -> dict[Prefix, float]:
        return self._from_target((), 1.0)

    def output_law(self, draft: Prefix, verified: int) -> dict[Prefix, float]:
        """What is emitted, to γ + 1 tokens, given the draft and how much of it is verified."""
        law: dict[Prefix, float] = {}
        reached = 1.0  # chance that all before were accepted
        for k in range(verified):
            before, token = draft[:k], draft[k]
            p, q = self.p(before), self.q(before)
            accept = min(1.0, p[token] / q[token])
            residual = np.maximum(p - q, 0.0)
            for other in range(2):
                if residual.sum() > 0 and accept < 1.0:
                    weight = reached * (1.0 - accept) * residual[other] / residual.sum()
                    _add(law, self._from_target((*before, other), weight))
            reached *= accept
        _add(law, self._from_target(draft[:verified], reached))
        return law

    def _from_target(self, prefix: Prefix, weight: float) -> dict[Prefix, float]:
        law = {prefix: weight}
        for _ in range(self.block + 1 - len(prefix)):
            law = {(*head, t): w * self.p(head)[t] for head, w in law.items() for t in range(2)}
        return law


def _add(law: dict, other: dict) -> None:
    for key, weight in other.items():
        law[key] = law.get(key, 0.0) + weight


def output_law(toys: list[Toy], rule: Rule, stale: np.ndarray, cost_ms: np.ndarray) -> dict[tuple, float]:
    """The joint law of all requests' outputs after one step under `rule`."""
    block, full = toys[0].block, np.full(len(toys), toys[0].block)
    law: dict[tuple, float] = {}
    for drafts in itertools.product(itertools.product(range(2), repeat=block), repeat=len(toys)):
        current = survival(np.array([toy.confidences(d) for toy, d in zip(toys, drafts, strict=True)]))
        view = LengthView(current, stale, full, len(toys), len(toys), cost_ms, threshold=0.3, fixed_tokens=1)
        lens = rule(view).lens
        weight = float(np.prod([toy.draft_law(d) for toy, d in zip(toys, drafts, strict=True)]))
        parts = [toy.output_law(d, int(n)).items() for toy, d, n in zip(toys, drafts, lens, strict=True)]
        for combination in itertools.product(*parts):
            key = tuple(tokens for tokens, _ in combination)
            law[key] = law.get(key, 0.0) + weight * float(np.prod([w for _, w in combination]))
    return law


def target_law(toys: list[Toy]) -> dict[tuple, float]:
    parts = [toy.target_law().items() for toy in toys]
    return {
        tuple(tokens for tokens, _ in combination): float(np.prod([w for _, w in combination]))
        for combination in itertools.product(*parts)
    }


def distance(a: dict[tuple, float], b: dict[tuple, float]) -> float:
    """Total variation."""
    return 0.5 * sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys())


def full_search_on_current(view: LengthView) -> LengthDecision:
    """The planted fault: the best budget by scores that have seen the tokens they decide about."""
    values, _ = rank_tokens(view.current_survival, view.max_lens)
    budget = int(np.argmax(throughput(values, view.num_decoding, view.cost_ms)))
    return LengthDecision(admit_top(view.current_survival, budget, view.max_lens), budget, 0.0)


APPENDIX_A = Toy(
    block=2,
    p=lambda prefix: np.array([0.7, 0.3]),
    q=lambda prefix: np.array([0.5, 0.5]),
    confidence=lambda prefix: 0.8 if not prefix else (0.9 if prefix[0] == 0 else 0.0),
)
APPENDIX_A_COST_MS = 1.0 / np.array([1.0, 0.5, 0.45])
APPENDIX_A_STALE = np.array([[0.8, 0.4]])


def first_token_law(rule: Rule, stale: np.ndarray = APPENDIX_A_STALE) -> list[float]:
    law = output_law([APPENDIX_A], rule, stale, APPENDIX_A_COST_MS)
    return [sum(weight for ((first, *_),), weight in law.items() if first == token) for token in range(2)]


def test_appendix_a_full_search_on_current_scores_is_caught():
    np.testing.assert_allclose(first_token_law(full_search_on_current), [0.85, 0.15])


@pytest.mark.parametrize("mode", LENGTH_RULES.names())
@pytest.mark.parametrize("stale_second", [0.72, 0.4, 0.0])
def test_appendix_a_no_mode_bends_the_law(mode, stale_second):
    stale = np.array([[0.8, stale_second]])
    np.testing.assert_allclose(first_token_law(LENGTH_RULES.get(mode), stale), [0.7, 0.3])


def test_appendix_a_adaptive_does_verify_both_tokens_on_good_old_scores():
    """So that the test above is not passed by verifying nothing."""
    view = LengthView(
        np.array([[0.8, 0.0]]), np.array([[0.8, 0.72]]), np.array([2]), 1, 1, APPENDIX_A_COST_MS
    )
    assert LENGTH_RULES.get("adaptive")(view).budget == 2


def random_toy(rng: np.random.Generator, block: int) -> Toy:
    """Laws and confidences drawn for every prefix; extreme confidences, so that rules react to them."""
    prefixes = [prefix for k in range(block + 1) for prefix in itertools.product(range(2), repeat=k)]
    p = {prefix: rng.dirichlet([1.0, 1.0]) for prefix in prefixes}
    q = {prefix: rng.dirichlet([1.0, 1.0]) for prefix in prefixes}
    c = {prefix: float(rng.choice([0.02, 0.3, 0.6, 0.98])) for prefix in prefixes}
    return Toy(block, p.__getitem__, q.__getitem__, c.__getitem__)


def random_fleet(seed: int) -> tuple[list[Toy], np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    toys = [random_toy(rng, block=2) for _ in range(2)]
    stale = survival(rng.random((2, 2)))
    cost_ms = 5.0 + np.cumsum(rng.choice([0.0, 0.5, 4.0], size=5))
    return toys, stale, cost_ms


@pytest.mark.parametrize("mode", LENGTH_RULES.names())
def test_the_joint_law_of_two_requests_is_the_targets(mode):
    for seed in range(12):
        toys, stale, cost_ms = random_fleet(seed)
        law = output_law(toys, LENGTH_RULES.get(mode), stale, cost_ms)
        assert sum(law.values()) == pytest.approx(1.0)
        assert distance(law, target_law(toys)) < 1e-12


def test_the_enumeration_catches_the_planted_rule_on_random_laws_too():
    found = []
    for seed in range(12):
        toys, stale, cost_ms = random_fleet(seed)
        found.append(distance(output_law(toys, full_search_on_current, stale, cost_ms), target_law(toys)))
    assert max(found) > 0.02
