"""How well a drafter does on given prompts: accepted length, acceptance by position, sanity of the text.

Run with mode `fixed`: with every draft token verified, the figures are the drafter's alone. Texts end by
themselves or at `max_tokens`; τ over texts forced to go on would count loops, which every drafter predicts
well, and the share of different 4-grams shows them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dspark_ray.core.types import FinishReason, Request, SamplingParams
from dspark_ray.engine.draft_log import DraftLog, DraftRecord
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.measure import TimedRun, distinct_ngrams, timed_run
from dspark_ray.engine.offline import OnStep


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One run over a set of prompts."""

    run: TimedRun
    tried: NDArray[np.int64]  # [γ] verified drafts that were accepted up to the position before
    accepted: NDArray[np.int64]  # [γ] of them, accepted there too
    records: list[DraftRecord]

    @property
    def tau(self) -> float:
        """Emitted decode tokens per request and target step, the bonus token included."""
        return self.run.counters.tau

    @property
    def conditional_acceptance(self) -> list[float | None]:
        """Chance that a position is accepted, given that all before it were; None where never tried. [γ]"""
        pairs = zip(self.accepted.tolist(), self.tried.tolist(), strict=True)
        return [accepted / tried if tried else None for accepted, tried in pairs]

    def report(self) -> dict[str, object]:
        """The figures as plain values."""
        completions = [c for c in self.run.completions if c.finish_reason is not FinishReason.ERROR]
        ended = sum(c.finish_reason is FinishReason.STOP for c in completions)
        counters = self.run.counters
        verified, steps = counters.verified_tokens, counters.request_steps
        return {
            "prompts": len(self.run.completions),
            "refused_prompts": len(self.run.completions) - len(completions),
            "ended_naturally": ended,
            "output_tokens": self.run.num_tokens,
            "tau": round(self.tau, 4),
            "verified_tokens_per_step": round(verified / steps, 4) if steps else None,
            "accepted_share": round(counters.accepted_tokens / verified, 4) if verified else None,
            "conditional_acceptance": _rounded(self.conditional_acceptance),
            "tried_per_position": self.tried.tolist(),
            "accepted_per_position": self.accepted.tolist(),
            "distinct_4grams": round(distinct_ngrams([c.token_ids for c in completions]), 4),
            "tokens_per_s": round(self.run.tokens_per_s, 2),
            "wall_s": round(self.run.wall_s, 2),
        }


def evaluate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    concurrency: int,
    on_step: OnStep | None = None,
) -> Evaluation:
    """Answers all prompts and says how the drafts fared. The engine must be idle.

    With a seed in `sampling`, prompt i gets seed + i: equal noise for all would tie their texts together.
    """
    requests = [
        Request(f"prompt-{number}", tuple(prompt), _numbered(sampling, number))
        for number, prompt in enumerate(prompts)
    ]
    engine.draft_log = DraftLog()
    try:
        run = timed_run(engine, requests, concurrency=concurrency, on_step=on_step)
        records = engine.draft_log.records
    finally:
        engine.draft_log = None
    tried, accepted = count_positions(records, engine.counters.block_size)
    return Evaluation(run, tried, accepted, records)


def count_positions(
    records: Sequence[DraftRecord], block_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(tried, accepted) drafts per position. [γ], [γ]"""
    verified = np.array([record.num_verified for record in records], dtype=np.int64)[:, None]
    accepted = np.array([record.num_accepted for record in records], dtype=np.int64)[:, None]
    position = np.arange(1, block_size + 1)[None, :]
    tried = (position <= verified) & (position <= accepted + 1)
    return tried.sum(axis=0), (position <= accepted).sum(axis=0)


def _numbered(sampling: SamplingParams, number: int) -> SamplingParams:
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=sampling.seed + number)


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else round(value, 4) for value in values]
