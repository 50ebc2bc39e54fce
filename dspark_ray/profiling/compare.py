"""Ways of decoding, side by side: the same target, the same prompts, one process, rounds in turn.

Every round runs every variant at every concurrency, in an order that rotates, and a variant is judged by its
ratio to plain decoding in the same round: what the machine does meanwhile hits both. The engines share the
target's weights, and the drafter where they use the same one, since they run one at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from dspark_ray.core.clock import SystemClock
from dspark_ray.core.config import AppConfig, DrafterConfig
from dspark_ray.core.errors import ConfigError
from dspark_ray.core.types import Request, SamplingParams, VerificationMode
from dspark_ray.engine.build import TargetLoader, build_drafter, eos_token_ids
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.measure import TimedRun, distinct_ngrams, timed_run, warm_up
from dspark_ray.profiling.cache import build_profiled_engine, ensure_table
from dspark_ray.profiling.machine import machine_facts, portable_config
from dspark_ray.profiling.ratio import Run, pairwise


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of decoding: a mode, with the configured drafter or with prompt look-up."""

    mode: VerificationMode
    ngram: bool = False
    fixed_tokens: int | None = None  # mode fixed only; None: all γ


VARIANTS: dict[str, Variant] = {
    "off": Variant(VerificationMode.OFF),
    "fixed": Variant(VerificationMode.FIXED),  # all γ
    "adaptive": Variant(VerificationMode.ADAPTIVE),
    "algorithm1": Variant(VerificationMode.ALGORITHM1),
    "threshold": Variant(VerificationMode.THRESHOLD),
    "ngram": Variant(VerificationMode.ADAPTIVE, ngram=True),  # differs from `adaptive` in the drafter only
    "ngram-fixed": Variant(VerificationMode.FIXED, ngram=True),
    **{f"fixed-{k}": Variant(VerificationMode.FIXED, fixed_tokens=k) for k in range(1, 8)},
}
DEFAULT_VARIANTS = ("off", "fixed", "adaptive", "algorithm1", "ngram")
BASELINE = "off"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One variant at one concurrency in one round."""

    variant: str
    concurrency: int
    round: int
    tokens_per_s: float  # prefill included
    decode_tokens_per_s: float  # steps without prefill only
    ratio_to_off: float  # of tokens_per_s, in the same round
    tau: float
    mean_budget_tokens: float  # verified a decoding step
    trimmed_share: float  # of decoding steps
    distinct_budgets: int
    distinct_4grams: float
    same_text_share: float  # of prompts whose text is that of `off`: bf16 near-ties make it less than 1
    output_tokens: int
    wall_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """All measurements, in the order in which they were made, and each request's times for the ratios."""

    measurements: list[Measurement]
    runs: dict[int, dict[str, list[Run]]]  # by concurrency and variant, a run each round

    def ratios(self) -> list[dict[str, float | int | str]]:
        """Each variant's throughput to each other one's, with a 95% interval."""
        return [
            {"concurrency": concurrency, **row}
            for concurrency, runs in self.runs.items()
            for row in pairwise(runs)
        ]

    def medians(self) -> list[dict[str, float | int | str]]:
        """One row for each concurrency and variant: the median over rounds of every figure."""
        groups: dict[tuple[int, str], list[Measurement]] = {}
        for item in self.measurements:
            groups.setdefault((item.concurrency, item.variant), []).append(item)
        return [
            {"concurrency": concurrency, "variant": variant, "rounds": len(items), **_median_of(items)}
            for (concurrency, variant), items in sorted(groups.items(), key=lambda entry: entry[0][0])
        ]


_FIGURES = (
    "tokens_per_s",
    "decode_tokens_per_s",
    "ratio_to_off",
    "tau",
    "mean_budget_tokens",
    "trimmed_share",
    "distinct_4grams",
    "same_text_share",
)


OnRun = Callable[[str, int, int, TimedRun], None]  # variant, concurrency, round, run


def run_comparison(
    config: AppConfig,
    model_dir: Path,
    prompts: Sequence[Sequence[int]],
    *,
    names: Sequence[str] = DEFAULT_VARIANTS,
    concurrencies: Sequence[int] = (1, 8),
    rounds: int = 3,
    max_tokens: int = 128,
    on_run: OnRun | None = None,
    load: TargetLoader | None = None,
) -> dict[str, Any]:
    """Builds, compares, and gives a result file's content: medians, all measurements, where and how.
    `load`: as in `build_engine`."""
    kv_tokens = kv_tokens_needed(prompts, max(concurrencies), max_tokens)
    engines = build_contenders(config, model_dir, names, kv_tokens=kv_tokens, load=load)
    comparison = compare(
        engines, prompts, concurrencies=concurrencies, rounds=rounds, max_tokens=max_tokens, on_run=on_run
    )
    tables = {name: engine.budget.table for name, engine in engines.items()}
    return {
        "machine": machine_facts(),
        "settings": {"prompts": len(prompts), "max_tokens": max_tokens, "rounds": rounds},
        "config": portable_config(config),
        "step_tables": {name: table.to_dict() for name, table in tables.items() if table is not None},
        "medians": comparison.medians(),
        "ratios": comparison.ratios(),
        "measurements": [asdict(item) for item in comparison.measurements],
    }


def build_contenders(
    config: AppConfig,
    model_dir: Path,
    names: Sequence[str],
    *,
    kv_tokens: int,
    load: TargetLoader | None = None,
) -> dict[str, Engine]:
    """An engine for each variant, with KV for `kv_tokens`; loads the target once.

    `ConfigError` for an unknown name, or when the configuration has no drafter to compare.
    """
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise ConfigError(f"unknown variant {unknown[0]!r}; choose from: {', '.join(VARIANTS)}")
    if config.speculation.drafter.kind == "none":
        raise ConfigError("the configuration has no drafter: there is nothing to compare")
    base = _benchmark_config(config, kv_tokens)
    first = build_profiled_engine(_variant_config(base, VARIANTS["adaptive"]), model_dir=model_dir, load=load)
    ngram: Engine | None = None
    engines: dict[str, Engine] = {}
    for name in names:
        variant, own = VARIANTS[name], _variant_config(base, VARIANTS[name])
        if variant.ngram and ngram is None:
            drafter = build_drafter(own, first.target)
            ngram = Engine(own, first.target, drafter, None, SystemClock())
            ensure_table(ngram, model_dir)
        source = ngram if variant.ngram and ngram is not None else first
        engines[name] = Engine(
            own,
            first.target,
            None if variant.mode is VerificationMode.OFF else source.drafter,
            source.budget.table,
            SystemClock(),
            engine_id=name,
            eos_token_ids=eos_token_ids(model_dir),
        )
    return engines


def compare(
    engines: dict[str, Engine],
    prompts: Sequence[Sequence[int]],
    *,
    concurrencies: Sequence[int],
    rounds: int,
    max_tokens: int,
    on_run: OnRun | None = None,
) -> Comparison:
    """Greedy answers to all prompts by every engine, `rounds` times at each concurrency."""
    if BASELINE not in engines:
        raise ConfigError(f"a comparison needs the variant {BASELINE!r} to compare with")
    for engine in engines.values():
        warm_up(engine, list(prompts[0])[:32])
    names, measurements = list(engines), []
    kept: dict[int, dict[str, list[Run]]] = {n: {name: [] for name in names} for n in concurrencies}
    for number in range(rounds):
        for concurrency in concurrencies:
            shift = number % len(names)
            runs: dict[str, TimedRun] = {}
            for name in [*names[shift:], *names[:shift]]:
                requests = _requests(prompts, max_tokens)
                runs[name] = timed_run(engines[name], requests, concurrency=concurrency)
                if on_run is not None:
                    on_run(name, concurrency, number, runs[name])
            for name in names:
                kept[concurrency][name].append(_run_of(runs[name]))
            measurements += [
                _measure(name, concurrency, number, runs[name], runs[BASELINE]) for name in names
            ]
    return Comparison(measurements, kept)


def kv_tokens_needed(prompts: Sequence[Sequence[int]], concurrency: int, max_tokens: int) -> int:
    """KV for the longest prompts of a file at once, a block's worth of slack for each."""
    longest = sorted((len(prompt) for prompt in prompts), reverse=True)[:concurrency]
    longest += [longest[0]] * (concurrency - len(longest))
    return sum(longest) + concurrency * (max_tokens + 64)


def _requests(prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Request]:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return [Request(f"prompt-{n}", tuple(prompt), sampling) for n, prompt in enumerate(prompts)]


def _benchmark_config(config: AppConfig, kv_tokens: int) -> AppConfig:
    """No prefix cache: later rounds would find the prompts of earlier ones."""
    num_blocks = max(2, -(-kv_tokens // config.engine.kv_block_size))
    updates = {"prefix_cache": False, "kv_num_blocks": num_blocks}
    return config.model_copy(update={"engine": config.engine.model_copy(update=updates)})


def _variant_config(config: AppConfig, variant: Variant) -> AppConfig:
    speculation = config.speculation
    if (variant.fixed_tokens or 0) > speculation.num_draft_tokens:
        raise ConfigError(f"a draft has {speculation.num_draft_tokens} tokens, not {variant.fixed_tokens}")
    updates: dict[str, object] = {"mode": variant.mode, "fixed_tokens": variant.fixed_tokens}
    if variant.ngram:
        old = speculation.drafter
        updates["drafter"] = DrafterConfig(kind="ngram", ngram_min=old.ngram_min, ngram_max=old.ngram_max)
    return config.model_copy(update={"speculation": speculation.model_copy(update=updates)})


def _run_of(run: TimedRun) -> Run:
    answers = run.completions
    tokens = np.array([float(len(answer.token_ids)) for answer in answers])
    return Run(run.tokens_per_s, tokens, np.array([(a.ended_ms - a.submitted_ms) / 1e3 for a in answers]))


def _measure(name: str, concurrency: int, number: int, run: TimedRun, baseline: TimedRun) -> Measurement:
    pairs = zip(run.completions, baseline.completions, strict=True)
    same = sum(mine.token_ids == plain.token_ids for mine, plain in pairs)
    return Measurement(
        variant=name,
        concurrency=concurrency,
        round=number,
        tokens_per_s=run.tokens_per_s,
        decode_tokens_per_s=run.decode_tokens_per_s,
        ratio_to_off=run.tokens_per_s / baseline.tokens_per_s,
        tau=run.counters.tau,
        mean_budget_tokens=run.steps.mean_budget_tokens,
        trimmed_share=run.steps.trimmed_share,
        distinct_budgets=run.steps.distinct_budgets,
        distinct_4grams=distinct_ngrams([c.token_ids for c in run.completions]),
        same_text_share=same / len(run.completions),
        output_tokens=run.num_tokens,
        wall_s=run.wall_s,
    )


def _median_of(items: Sequence[Measurement]) -> dict[str, float | int | str]:
    return {figure: median(float(getattr(item, figure)) for item in items) for figure in _FIGURES}
