"""One seed, one text: whatever the mode and however many requests run beside it. And what that costs.

    python benchmarks/seeds.py --prompts mt-bench.jsonl [--limit 64] [--alone 16] [--max-tokens 48]
        [--dtype bfloat16] [--name seeds-bf16] [--config configs/smollm2-135m-cpu.yaml]

Sampled at temperature 1 with a seed, by plain decoding and each mode, 1, 16 and 64 requests at a time (the
first `--alone` prompts only where one runs at a time). Counts the texts that are the same in all runs, and
measures the accepted length τ of everything verified under shared noise beside that of the rejection rule on
the same prompts. Exits with 1 if fp32 texts differ, or if nothing was drafted or accepted.
Writes benchmarks/results/NAME.json.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dspark_ray.cli.common import load_config, prepare_torch
from dspark_ray.core.types import Request, SamplingParams
from dspark_ray.engine.build import DTYPES
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.measure import TimedRun, timed_run
from dspark_ray.models.fetch import resolve_model
from dspark_ray.models.prompts import read_prompts
from dspark_ray.models.tokenizer import Tokenizer
from dspark_ray.profiling.machine import machine_facts
from dspark_ray.profiling.modes import build_modes

PROJECT_DIR = Path(__file__).resolve().parents[1]
RESULTS_DIR = PROJECT_DIR / "benchmarks" / "results"
PLAIN, FULL = "off", "fixed"
MODES = (PLAIN, FULL, "adaptive")
CONCURRENCIES = (1, 16, 64)
TAU_CONCURRENCY = 16


@dataclass(frozen=True, slots=True)
class SeededRun:
    """One mode at one concurrency."""

    mode: str
    concurrency: int
    num_texts: int
    num_tokens: int
    same_as_plain: int  # texts that are those of plain decoding at the same concurrency
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class SeedReport:
    """All runs."""

    num_compared: int  # texts that every run has
    same_everywhere: int  # of them: the same in every mode at every concurrency
    same_by_mode: dict[str, int]  # of them: the same at every concurrency
    tau_shared_noise: float
    tau_rejection: float
    runs: list[SeededRun]


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=PROJECT_DIR / "configs" / "smollm2-135m-cpu.yaml")
    parser.add_argument("--limit", type=int, default=64, help="prompts")
    parser.add_argument("--alone", type=int, default=16, help="of them, where one runs at a time")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--name", default="seeds-bf16", help="of the result file")
    options = parser.parse_args()

    config = load_config(options.config)
    prepare_torch(config)
    model_dir = resolve_model(config.model.source)
    tokenizer = Tokenizer.load(model_dir)
    prompts = [prompt.token_ids for prompt in read_prompts(options.prompts, tokenizer, options.limit)]
    engines = build_modes(config, model_dir, MODES, options.dtype)
    report = compare(engines, prompts, options.alone, options.max_tokens)
    print(_line(report))
    result = {
        "machine": machine_facts(),
        "settings": {
            "prompts": options.prompts.name,
            "num_prompts": len(prompts),
            "alone": options.alone,
            "max_tokens": options.max_tokens,
            "dtype": options.dtype,
            "temperature": 1.0,
        },
        **asdict(report),
    }
    path = RESULTS_DIR / f"{options.name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path.relative_to(PROJECT_DIR)}")
    sys.exit(proves_nothing(report) or (options.dtype == "float32" and differs(report)))


def compare(
    engines: dict[str, Engine], prompts: Sequence[Sequence[int]], alone: int, max_tokens: int
) -> SeedReport:
    """Every mode at every concurrency, and both acceptance rules with everything verified."""
    texts: dict[tuple[str, int], list[tuple[int, ...]]] = {}
    runs = []
    for concurrency in CONCURRENCIES:
        for mode, engine in engines.items():
            own = prompts[:alone] if concurrency == 1 else prompts
            run = _run(engine, own, max_tokens, concurrency)
            texts[mode, concurrency] = [completion.token_ids for completion in run.completions]
            plain = texts[PLAIN, concurrency]
            same = sum(a == b for a, b in zip(texts[mode, concurrency], plain, strict=True))
            runs.append(
                SeededRun(
                    mode=mode,
                    concurrency=concurrency,
                    num_texts=len(own),
                    num_tokens=run.num_tokens,
                    same_as_plain=same,
                    drafted=run.counters.drafted_tokens,
                    accepted=run.counters.accepted_tokens,
                )
            )
            print(f"{runs[-1]} {run.wall_s:.0f} s", flush=True)
    full = engines[FULL]
    rejection = _run(full, prompts, max_tokens, TAU_CONCURRENCY, shared_noise=False)
    shared = _run(full, prompts, max_tokens, TAU_CONCURRENCY)
    return SeedReport(
        num_compared=alone,
        same_everywhere=_num_same(list(texts.values())),
        same_by_mode={mode: _num_same([texts[mode, c] for c in CONCURRENCIES]) for mode in engines},
        tau_shared_noise=shared.counters.tau,
        tau_rejection=rejection.counters.tau,
        runs=runs,
    )


def _run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    concurrency: int,
    *,
    shared_noise: bool = True,
) -> TimedRun:
    sampling = SamplingParams(temperature=1.0, seed=11, shared_noise=shared_noise, max_tokens=max_tokens)
    requests = [Request(f"prompt-{n}", tuple(prompt), sampling) for n, prompt in enumerate(prompts)]
    return timed_run(engine, requests, concurrency=concurrency)


def _num_same(lists: Sequence[Sequence[tuple[int, ...]]]) -> int:
    """Places at which all lists hold the same text, as far as the shortest one goes."""
    return sum(len(set(row)) == 1 for row in zip(*lists, strict=False))


def proves_nothing(report: SeedReport) -> bool:
    """Whether a mode drafted nothing, or had nothing accepted."""
    return any(run.drafted == 0 or run.accepted == 0 for run in report.runs if run.mode != PLAIN)


def differs(report: SeedReport) -> bool:
    """Whether any text is not plain decoding's."""
    all_plain = all(run.same_as_plain == run.num_texts for run in report.runs)
    return not all_plain or report.same_everywhere < report.num_compared


def _line(report: SeedReport) -> str:
    return (
        f"{report.same_everywhere} of {report.num_compared} texts the same everywhere; by mode "
        f"{report.same_by_mode}; τ {report.tau_shared_noise:.2f} with shared noise, "
        f"{report.tau_rejection:.2f} by the rejection rule"
    )


if __name__ == "__main__":
    main()
