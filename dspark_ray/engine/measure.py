"""What an offline run cost: wall time, counters, and what its steps looked like.

run = timed_run(engine, [Request(...), ...], concurrency=8)
print(run.tokens_per_s, run.counters.tau, run.steps.mean_budget_tokens)
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from dspark_ray.core.clock import Clock, SystemClock
from dspark_ray.core.types import Request, RequestOutput, SamplingParams, SpeculationCounters
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.offline import Completion, OnStep, generate_all
from dspark_ray.engine.recent import StepRecord
from dspark_ray.models.tokenizer import IncrementalDetokenizer


@dataclass(frozen=True, slots=True)
class StepSummary:
    """The steps of one run."""

    num_steps: int
    num_decode_steps: int  # with at least one decoding request
    mean_budget_tokens: float  # draft tokens verified a decoding step
    distinct_budgets: int
    trimmed_share: float  # of decoding steps: those that chose not to verify tokens they could have
    decode_only_ms: float  # time of steps without prefill
    decode_only_tokens: int  # tokens emitted in them


@dataclass(frozen=True, slots=True)
class TimedRun:
    """`generate_all` with what it cost. Counters are of this run alone."""

    completions: list[Completion]
    wall_s: float
    counters: SpeculationCounters
    steps: StepSummary

    @property
    def num_tokens(self) -> int:
        """Output tokens of all completions."""
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of the whole run, prefill included."""
        return self.num_tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """The same over the steps that only decode."""
        return (
            1e3 * self.steps.decode_only_tokens / self.steps.decode_only_ms
            if self.steps.decode_only_ms
            else 0.0
        )


def timed_run(
    engine: Engine,
    requests: Sequence[Request],
    *,
    concurrency: int,
    on_step: OnStep | None = None,
    detokenizers: Sequence[IncrementalDetokenizer] | None = None,
    clock: Clock | None = None,
    arrivals_ms: Sequence[float] | None = None,
) -> TimedRun:
    """`generate_all`, timed and counted."""
    clock = clock or SystemClock()
    before, log = engine.stats().counters, _StepLog(engine)

    def note(outputs: list[RequestOutput]) -> None:
        log.note(outputs)
        if on_step is not None:
            on_step(outputs)

    started_ms = clock.now_ms()
    completions = generate_all(
        engine,
        requests,
        concurrency=concurrency,
        on_step=note,
        detokenizers=detokenizers,
        clock=clock,
        arrivals_ms=arrivals_ms,
    )
    wall_s = (clock.now_ms() - started_ms) / 1e3
    return TimedRun(completions, wall_s, subtract(engine.stats().counters, before), log.summary())


def warm_up(engine: Engine, prompt: Sequence[int], *, max_tokens: int = 8) -> None:
    """A short generation, so that first-use costs (compiled kernels, allocations) are not measured."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    generate_all(engine, [Request("warm-up", tuple(prompt), sampling)], concurrency=1)


def subtract(after: SpeculationCounters, before: SpeculationCounters) -> SpeculationCounters:
    """What was counted between two snapshots of one engine."""
    result = SpeculationCounters(after.block_size)
    for counter in fields(SpeculationCounters):
        new, old = getattr(after, counter.name), getattr(before, counter.name)
        if counter.name != "block_size":
            difference = (
                [a - b for a, b in zip(new, old, strict=True)] if isinstance(new, list) else new - old
            )
            setattr(result, counter.name, difference)
    return result


def distinct_ngrams(texts: Sequence[Sequence[int]], n: int = 4) -> float:
    """Share of different n-grams among all n-grams of all texts; 1 without any. Near 0: it repeats itself."""
    grams = [tuple(text[i : i + n]) for text in texts for i in range(len(text) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


class _StepLog:
    """Collects each step's record, whether it trimmed, and the tokens it emitted."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps = engine.counters.target_steps
        self._available = 0  # draft tokens that the coming step can verify
        self._entries: list[tuple[StepRecord, bool, int]] = []

    def note(self, outputs: list[RequestOutput]) -> None:
        recent, steps = self._engine.recent_steps(), self._engine.counters.target_steps
        if recent and steps > self._steps:  # else there was nothing to run
            record = recent[-1]
            emitted = sum(len(output.token_ids) for output in outputs)
            self._entries.append((record, record.budget_tokens < self._available, emitted))
        # Tokens past the end of a request are cut in every mode, and are not the scheduler's doing.
        self._available = sum(
            min(len(sequence.draft.token_ids), sequence.remaining_tokens - 1)
            for sequence in self._engine.admission.decoding()
            if sequence.draft is not None
        )
        self._steps = steps

    def summary(self) -> StepSummary:
        decoding = [entry for entry in self._entries if entry[0].num_decoding]
        budgets = [record.budget_tokens for record, _, _ in decoding]
        pure = [e for e in decoding if e[0].rows == e[0].num_decoding + e[0].budget_tokens]
        count = len(decoding)
        return StepSummary(
            num_steps=len(self._entries),
            num_decode_steps=count,
            mean_budget_tokens=sum(budgets) / count if count else 0.0,
            distinct_budgets=len(set(budgets)),
            trimmed_share=sum(trimmed for _, trimmed, _ in decoding) / count if count else 0.0,
            decode_only_ms=sum(record.measured_ms for record, _, _ in pure),
            decode_only_tokens=sum(emitted for _, _, emitted in pure),
        )
