"""Which draft tokens would stand, and what the drafter says about them: recorded or modelled.

Both become one thing, a bank of blocks that each request walks through from a random start:

- a *record* of a real run (core/step_record.py) gives blocks in the order in which its requests met them;
- a *model* of a task gives conditional acceptance by position, with a spread between blocks that lasts from
  one block of a request to the next, and confidences that may be off.

A block knows how many of its leading tokens the target would accept if all were verified. Verifying ℓ of
them then emits min(ℓ, that) + 1 tokens, whatever the policy: one bank serves every policy alike.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dspark_ray.core.errors import ArtefactError
from dspark_ray.core.step_record import read_steps
from dspark_ray.core.types import FloatArray, IntArray
from dspark_ray.scheduling.survival import survival

MODEL_BLOCKS = 8192
MOST_CENSORED = 0.2  # of a record's drafts; beyond it other policies cannot be judged on it


@dataclass(frozen=True, slots=True)
class AcceptanceModel:
    """One task's drafts in a few figures."""

    conditional: tuple[float, ...]  # [γ] chance that token k stands, given that all before it did
    spread: float = 1.0  # standard deviation between blocks, in logits
    persistence: float = 0.6  # correlation of that from one block of a request to the next
    confidence_scale: float = 1.0  # of the logit; above 1: overconfident
    confidence_bias: float = 0.0  # added to the logit; above 0: optimistic


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of one task, in the order in which a request meets them."""

    survival: FloatArray  # [M, γ] what policies are told
    accepted: IntArray  # [M] leading tokens that stand when all are verified


class AcceptanceBank:
    """The blocks of all tasks in one array; request pointers are places in it."""

    def __init__(self, tasks: Sequence[Blocks]) -> None:
        assert tasks, "there is at least one task"
        gamma = {blocks.survival.shape[1] for blocks in tasks}
        assert len(gamma) == 1, "all tasks have the same block size"
        self.num_draft_tokens = gamma.pop()
        self.survival = np.concatenate([blocks.survival for blocks in tasks]).astype(np.float32)
        self.accepted = np.concatenate([blocks.accepted for blocks in tasks]).astype(np.int64)
        self._sizes = np.array([len(blocks.accepted) for blocks in tasks], dtype=np.int64)
        self._offsets = np.concatenate(([0], np.cumsum(self._sizes)[:-1])).astype(np.int64)

    @property
    def num_tasks(self) -> int:
        return len(self._sizes)

    def start(self, tasks: IntArray, rng: np.random.Generator) -> IntArray:
        """A random place for a new request of each task. tasks [n] → [n]"""
        place = rng.random(len(tasks)) * self._sizes[tasks]
        return np.asarray(self._offsets[tasks] + place.astype(np.int64), dtype=np.int64)

    def next(self, places: IntArray, tasks: IntArray) -> IntArray:
        """The place after each, back to the first one at a task's end."""
        inside = places - self._offsets[tasks] + 1
        return np.asarray(self._offsets[tasks] + inside % self._sizes[tasks], dtype=np.int64)


def modelled_blocks(
    model: AcceptanceModel, rng: np.random.Generator, num_blocks: int = MODEL_BLOCKS
) -> Blocks:
    """Blocks drawn from a model. The conditional acceptance over them is the model's, by construction."""
    gamma = len(model.conditional)
    noise = rng.standard_normal((num_blocks, gamma))
    shared = _autoregressive(rng.standard_normal(num_blocks), model.persistence)
    half = np.sqrt(0.5)  # of the spread, half belongs to the block and half to the position
    deviation = model.spread * half * (shared[:, None] + noise)
    chance = np.empty((num_blocks, gamma))
    reached = np.ones(num_blocks)  # chance that the tokens before stood: those weigh in what follows
    for position, mean in enumerate(model.conditional):
        chance[:, position] = _with_mean(deviation[:, position], reached, mean)
        reached = reached * chance[:, position]
    told = _sigmoid(model.confidence_scale * _logit(chance) + model.confidence_bias)
    return Blocks(survival(told).astype(np.float32), _leading(rng.random((num_blocks, gamma)) < chance))


def recorded_blocks(paths: Iterable[Path], num_draft_tokens: int, rng: np.random.Generator) -> Blocks:
    """Blocks of recorded runs, request by request; `ArtefactError` if no draft is among them.

    A draft whose outcome is known only up to ℓ (all ℓ verified tokens stood, more were drafted) is
    completed by its own confidences. Too many of them would make other policies look as the confidences say
    and not as they are: more than a share of `MOST_CENSORED` is an `ArtefactError`.
    """
    scores: list[FloatArray] = []
    accepted: list[int] = []
    censored = 0
    for path in paths:
        drafts = sorted(
            ((draft.request, step_number, draft) for step_number, step in enumerate(read_steps(path))
             for draft in step.drafts),
            key=lambda item: item[:2],
        )  # fmt: skip
        for _, _, draft in drafts:
            told = np.zeros(num_draft_tokens, dtype=np.float32)
            width = min(len(draft.survival), num_draft_tokens)
            told[:width] = draft.survival[:width]
            stood = min(draft.accepted, width)
            if draft.accepted >= draft.verified and draft.verified < width:
                censored += 1
                stood = _complete(told, draft.verified, width, rng)
            scores.append(told)
            accepted.append(stood)
    if not scores:
        raise ArtefactError("the record holds no drafts: record a run with a drafter")
    if censored > MOST_CENSORED * len(scores):
        raise ArtefactError(
            f"{censored} of {len(scores)} recorded drafts were trimmed, so what would have become of their "
            "last tokens is unknown: record with speculation.mode fixed"
        )
    return Blocks(np.stack(scores), np.array(accepted, dtype=np.int64))


def conditional_acceptance(blocks: Blocks) -> list[float]:
    """Share of the blocks that reached position k in which token k stood. → [γ]"""
    reached = [int((blocks.accepted >= k).sum()) for k in range(blocks.survival.shape[1] + 1)]
    return [after / before if before else 0.0 for before, after in pairwise(reached)]


def _complete(told: FloatArray, known: int, width: int, rng: np.random.Generator) -> int:
    """Leading tokens that stand, when the first `known` are known to."""
    before = float(told[known - 1]) if known else 1.0
    draw = rng.random() * before  # a_k / a_known is the chance to get from one to the other
    return known + int((told[known:width] > draw).sum())


def _leading(stood: NDArray[np.bool_]) -> IntArray:
    """Leading true values of each row. [M, γ] → [M]"""
    return np.asarray(np.logical_and.accumulate(stood, axis=1).sum(axis=1), dtype=np.int64)


def _autoregressive(noise: NDArray[np.float64], persistence: float) -> NDArray[np.float64]:
    """Unit variance, correlation `persistence` between neighbours."""
    values = np.empty_like(noise)
    kept, new = persistence, np.sqrt(1.0 - persistence**2)
    value = noise[0]
    for index, draw in enumerate(noise):
        value = kept * value + new * draw
        values[index] = value
    return values


def _with_mean(
    deviation: NDArray[np.float64], weight: NDArray[np.float64], mean: float
) -> NDArray[np.float64]:
    """sigmoid(α + deviation), with α such that the weighted mean is `mean`: bisection."""
    low, high = -30.0, 30.0
    for _ in range(50):
        middle = (low + high) / 2
        if np.average(_sigmoid(middle + deviation), weights=weight) < mean:
            low = middle
        else:
            high = middle
    return _sigmoid((low + high) / 2 + deviation)


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(x, -60.0, 60.0))), dtype=np.float64)


def _logit(p: NDArray[np.float64]) -> NDArray[np.float64]:
    bounded = np.clip(p, 1e-9, 1.0 - 1e-9)
    return np.asarray(np.log(bounded / (1.0 - bounded)), dtype=np.float64)
