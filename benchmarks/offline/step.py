"""One engine's steps: against the memory's bandwidth, the host's share, and predicted against measured time.

    python benchmarks/offline/step.py --prompts FILE.jsonl [--config configs/smollm2-135m-cpu.yaml]
        [--concurrency 1 8 32 64] [--limit 64] [--max-tokens 64] [--name step]

Greedy, `off` and `adaptive`. Bandwidth is the fastest of several ways of reading memory once, with the
engine's threads; the bound of a step is the time in which the target's weights are read at it. The host's
share is what a step takes outside the compiled library's calls, Python and torch together. Writes
benchmarks/results/NAME.json. Needs an otherwise idle machine.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from compare import PROJECT_DIR, RESULTS_DIR
from dspark_kernels.cpu_ops import CpuOps
from dspark_kernels.dispatch import cpu_version

from dspark_ray.cli.bench import print_rows
from dspark_ray.cli.common import load_config, prepare_torch
from dspark_ray.core.types import Request, RequestOutput, SamplingParams
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.measure import timed_run, warm_up
from dspark_ray.engine.recent import StepRecord
from dspark_ray.models.fetch import resolve_model
from dspark_ray.models.prompts import read_prompts
from dspark_ray.models.tokenizer import Tokenizer
from dspark_ray.profiling.compare import build_contenders, kv_tokens_needed
from dspark_ray.profiling.machine import machine_facts, portable_config

CALLS = ("run_stack", "run_draft", "multiply", "markov_chain", "argmax")
"""The compiled calls of a bf16 step."""
READ_BYTES = 1 << 30


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=PROJECT_DIR / "configs" / "smollm2-135m-cpu.yaml")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--limit", type=int, default=64, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--name", default="step", help="of the result file")
    options = parser.parse_args()

    config = load_config(options.config)
    prepare_torch(config)
    model_dir = resolve_model(config.model.source)
    found = read_prompts(options.prompts, Tokenizer.load(model_dir), options.limit)
    prompts = [prompt.token_ids for prompt in found]
    kv_tokens = kv_tokens_needed(prompts, max(options.concurrency), options.max_tokens)
    engines = build_contenders(config, model_dir, ("off", "adaptive"), kv_tokens=kv_tokens)
    kernels = KernelTime()
    bandwidth = read_bandwidth()
    read_ms = 1e3 * weight_bytes(engines["off"]) / bandwidth
    rows = []
    for engine in engines.values():
        warm_up(engine, list(prompts[0])[:32])
    for concurrency in options.concurrency:
        # Enough requests for some hundred steps, and no more.
        chosen = prompts[: max(concurrency, min(len(prompts), 8 * concurrency))]
        for name, engine in engines.items():
            row = {"concurrency": concurrency, "variant": name}
            rows.append(row | measure(engine, chosen, concurrency, options.max_tokens, kernels))
    plain = next((r for r in rows if (r["concurrency"], r["variant"]) == (1, "off")), None)
    print_rows(rows)
    bound = {
        "read_gb_per_s": bandwidth / 1e9,
        "weights_mb": weight_bytes(engines["off"]) / 1e6,
        "read_ms": read_ms,
        "step_to_read": None if plain is None else plain["step_ms"] / read_ms,
    }
    print("  ".join(f"{key} {value:.3g}" for key, value in bound.items() if value is not None))
    result = {
        "command": f"python benchmarks/offline/step.py --prompts {options.prompts.name}",
        "machine": machine_facts(),
        "config": portable_config(config),
        "bound": bound,
        "rows": rows,
    }
    path = RESULTS_DIR / f"{options.name}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written to {path.relative_to(PROJECT_DIR)}")


class KernelTime:
    """Seconds spent in the compiled calls of this process since the last `take`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        ops = cpu_version()
        if not isinstance(ops, CpuOps):
            raise SystemExit(
                "this benchmark is of the compiled CPU kernels (DSPARK_KERNELS=cpu says why not)"
            )
        for name in CALLS:
            setattr(ops, name, self._timed(getattr(ops, name)))

    def take(self) -> float:
        """And starts anew."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = call(*arguments)
            self._seconds += time.perf_counter() - began
            return result

        return timed


def measure(
    engine: Engine, prompts: list[list[int]], concurrency: int, max_tokens: int, kernels: KernelTime
) -> dict[str, Any]:
    """One run: medians over the steps that only decode, three quarters of the requests or more; the errors
    of predictions over all steps."""
    steps: list[tuple[StepRecord, float]] = []
    kernels.take()

    def note(_: list[RequestOutput]) -> None:
        if recent := engine.recent_steps():
            steps.append((recent[-1], 1e3 * kernels.take()))

    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    requests = [Request(f"prompt-{n}", tuple(prompt), sampling) for n, prompt in enumerate(prompts)]
    run = timed_run(engine, requests, concurrency=concurrency, on_step=note)
    full = [
        (record, ms)
        for record, ms in steps
        if record.num_decoding >= 0.75 * concurrency
        and record.rows == record.num_decoding + record.budget_tokens
    ]
    if not full:
        raise SystemExit(f"no step decoded {concurrency} requests alone: take more prompts or --max-tokens")
    known = [record for record, _ in steps if record.predicted_ms > 0]
    errors = [record.predicted_ms / record.measured_ms - 1.0 for record in known]
    total_ms = sum(record.measured_ms for record in known)
    return {
        "steps": len(steps),
        "tokens_per_s": run.tokens_per_s,
        "step_ms": median(record.measured_ms for record, _ in full),
        "host_ms": median(record.measured_ms - ms for record, ms in full),
        "host_share": sum(r.measured_ms - ms for r, ms in full) / sum(r.measured_ms for r, _ in full),
        "mean_abs_error": fmean(map(abs, errors)),
        "median_abs_error": median(map(abs, errors)),
        "total_error": sum(record.predicted_ms for record in known) / total_ms - 1.0,
    }


def weight_bytes(engine: Engine) -> int:
    """What one row reads: all matrices of the target, its LM head included."""
    target = engine.target
    matrices = [m for layer in target.layers for m in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    values = sum(matrix.in_features * matrix.out_features for matrix in [*matrices, target.head])
    return values * (1 if engine.config.model.quantization == "int8" else target.dtype.itemsize)


def read_bandwidth() -> float:
    """Bytes a second that memory gives to the threads of torch, the best of some sums and products."""
    source = torch.ones(READ_BYTES // 4)
    ways: tuple[Callable[[], Any], ...] = (
        source.sum,
        source.amax,
        lambda: source.dot(source),
        source.view(torch.int64).sum,
    )
    best = float("inf")
    for way in ways:
        for _ in range(5):
            began = time.perf_counter()
            way()
            best = min(best, time.perf_counter() - began)
    return READ_BYTES / best


if __name__ == "__main__":
    main()
