"""Are sampled texts as likely as the target's own? Every mode against plain decoding, at temperature 1.

Two figures of a text, both from a plain forward pass of the target over it:

- its *mean log-probability*: over all texts it must agree with plain decoding's as closely as plain decoding
  agrees with itself;
- its *surplus*, the mean of `log p(x_t) + H(p_t)` over its tokens. Drawn from p, each term has mean 0 given
  the tokens before it, whatever they are. So the surplus needs nothing to be compared with, and varies less.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from dspark_ray.core.types import FloatArray, SpeculationCounters
from dspark_ray.engine.scoring import teacher_forced_logits
from dspark_ray.models.drafters.base import DraftBlock, Drafter, DraftRequest
from dspark_ray.models.targets.decoder import Decoder

Z_95 = 1.959964
MAX_SURPLUS_Z = 3.0  # in standard errors: one mode in 370 is beyond by chance


@dataclass(frozen=True, slots=True)
class TextScores:
    """Texts of one run, [prompts, samples]."""

    logprobs: FloatArray  # mean over a text's tokens
    surplus: FloatArray


@dataclass(frozen=True, slots=True)
class Likelihood:
    """One run against plain decoding."""

    name: str
    num_texts: int
    mean_logprob: float
    difference: float  # from plain decoding's mean log-probability
    interval: float  # 95%: how far two runs of plain decoding may differ, either way
    surplus: float
    surplus_z: float  # the same in standard errors
    tau: float
    accepted: int
    trimmed: int

    @property
    def agrees(self) -> bool:
        """With plain decoding, as far as chance allows."""
        return abs(self.difference) <= self.interval

    @property
    def is_fair(self) -> bool:
        """Whether its tokens are draws from the target."""
        return abs(self.surplus_z) <= MAX_SURPLUS_Z


def score_texts(
    target: Decoder, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[Sequence[int]]]
) -> TextScores:
    """`texts[i][j]` is the j-th answer to prompt i; all prompts have equally many."""
    scores = np.array(
        [[_score(target, p, text) for text in own] for p, own in zip(prompts, texts, strict=True)]
    )
    return TextScores(scores[..., 0], scores[..., 1])


def _score(target: Decoder, prompt: Sequence[int], text: Sequence[int]) -> tuple[float, float]:
    logits = teacher_forced_logits(target, [*prompt, *text[:-1]], len(prompt) - 1)
    logp = logits.double().log_softmax(-1)
    chosen = logp[range(len(text)), list(text)]
    entropy = -(logp.exp() * logp).sum(-1)
    return float(chosen.mean()), float((chosen + entropy).mean())


def judge(
    name: str, scores: TextScores, plain: TextScores, plain_again: TextScores, counters: SpeculationCounters
) -> Likelihood:
    """`plain` and `plain_again` are two independent runs of plain decoding; they say how much chance does."""
    variance = np.mean([_variance(one.logprobs) for one in (plain, plain_again)])
    standard_error = _variance(scores.surplus) ** 0.5
    surplus = float(scores.surplus.mean())
    return Likelihood(
        name=name,
        num_texts=scores.logprobs.size,
        mean_logprob=float(scores.logprobs.mean()),
        difference=float(scores.logprobs.mean() - plain.logprobs.mean()),
        interval=float(Z_95 * (2 * variance) ** 0.5),
        surplus=surplus,
        surplus_z=surplus / standard_error,
        tau=counters.tau,
        accepted=counters.accepted_tokens,
        trimmed=counters.trimmed_tokens,
    )


def _variance(values: FloatArray) -> float:
    """Of the mean over all texts: prompts are given, answers are drawn."""
    return float(values.var(axis=1, ddof=1).mean() / values.size)


class LyingDrafter:
    """A bias to be found: draws its tokens as `inner` does, and claims that it drew them from a flatter
    distribution, so that too many are accepted."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def propose(self, requests: Sequence[DraftRequest]) -> DraftBlock:
        """The tokens of `inner`, and not their distribution."""
        block = self._inner.propose(requests)
        claimed = [None if probs is None else _flattened(probs) for probs in block.draft_probs]
        return replace(block, draft_probs=claimed)


def _flattened(probs: Tensor) -> Tensor:
    flat = probs**0.25
    return flat / flat.sum(-1, keepdim=True)
