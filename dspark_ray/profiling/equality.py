"""Is the greedy text really the target's own? Every mode against plain decoding, token by token.

A different token is excused only where the target itself hardly prefers one: both tokens within `tolerance`
of the highest logit in a plain forward pass over the text before. And a comparison counts only if there was
something to compare: drafts, accepted ones, and for adaptive trimmed ones under several budgets.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dspark_ray.core.types import Request, SamplingParams
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.measure import TimedRun, timed_run
from dspark_ray.engine.scoring import teacher_forced_logits

LOGIT_TOLERANCE = 1e-4
MIN_BUDGETS = 3  # of an adaptive run


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which a text leaves the plain one."""

    prompt: int
    position: int  # in the output
    expected: int | None  # None: the plain text had ended
    found: int | None
    logit_gap: float | None  # of the lower of both below the highest; None where one text simply ends
    excused: bool


@dataclass(frozen=True, slots=True)
class ModeReport:
    """One mode against plain decoding."""

    mode: str
    num_texts: int
    num_tokens: int
    drafted: int
    accepted: int
    trimmed: int
    distinct_budgets: int
    differences: list[Difference] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return all(difference.excused for difference in self.differences)

    @property
    def doubts(self) -> list[str]:
        """Why this comparison proves nothing; empty when it does."""
        wanted = {"nothing was drafted": self.drafted > 0, "nothing was accepted": self.accepted > 0}
        if self.mode == "adaptive":
            wanted["nothing was trimmed"] = self.trimmed > 0
            wanted[f"fewer than {MIN_BUDGETS} budgets"] = self.distinct_budgets >= MIN_BUDGETS
        return [doubt for doubt, fine in wanted.items() if not fine]

    @property
    def verdict(self) -> str:
        if not self.equal:
            return "DIFFERENT"
        return "INCONCLUSIVE" if self.doubts else "equal"


def check_equality(
    plain: Engine,
    others: dict[str, Engine],
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    concurrency: int,
    plain_concurrency: int | None = None,
    tolerance: float = LOGIT_TOLERANCE,
) -> list[ModeReport]:
    """Greedy texts of all engines, at most `max_tokens` each; `plain` has mode off.

    `plain` runs `plain_concurrency` requests at a time (None: as many as the others): one at a time, it also
    tells whether a text depends on the batch around it.
    """
    expected = _run(plain, prompts, max_tokens, plain_concurrency or concurrency)
    reports = []
    for mode, engine in others.items():
        run = _run(engine, prompts, max_tokens, concurrency)
        reports.append(
            ModeReport(
                mode=mode,
                num_texts=len(prompts),
                num_tokens=run.num_tokens,
                drafted=run.counters.drafted_tokens,
                accepted=run.counters.accepted_tokens,
                trimmed=run.counters.trimmed_tokens,
                distinct_budgets=run.steps.distinct_budgets,
                differences=[
                    difference
                    for number, prompt in enumerate(prompts)
                    if (
                        difference := _first_difference(
                            plain,
                            number,
                            prompt,
                            expected.completions[number].token_ids,
                            run.completions[number].token_ids,
                            tolerance,
                        )
                    )
                ],
            )
        )
    return reports


def _run(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, concurrency: int) -> TimedRun:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    requests = [Request(f"prompt-{n}", tuple(prompt), sampling) for n, prompt in enumerate(prompts)]
    return timed_run(engine, requests, concurrency=concurrency)


def _first_difference(
    plain: Engine,
    number: int,
    prompt: Sequence[int],
    expected: Sequence[int],
    found: Sequence[int],
    tolerance: float,
) -> Difference | None:
    if tuple(expected) == tuple(found):
        return None
    shared = min(len(expected), len(found))
    position = next((i for i in range(shared) if expected[i] != found[i]), shared)
    if position == shared:
        ends = [text[position] if position < len(text) else None for text in (expected, found)]
        return Difference(number, position, ends[0], ends[1], None, excused=False)
    before = [*prompt, *expected[:position]]
    logits = teacher_forced_logits(plain.target, before, len(before) - 1)[-1]
    pair = (expected[position], found[position])
    gap = float(logits.max() - min(logits[token] for token in pair))
    return Difference(number, position, *pair, logit_gap=gap, excused=gap < tolerance)
