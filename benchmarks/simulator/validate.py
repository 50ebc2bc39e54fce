"""The simulator against the engine: throughput, TPOT and budget at 1 to 64 requests.

    python benchmarks/simulator/validate.py --prompts FILE.jsonl [--config configs/smollm2-135m-cpu.yaml]
        [--concurrency 1 2 4 8 16 32 64] [--modes off adaptive] [--limit 64] [--max-tokens 96] [--rounds 2]

Greedy answers, natural ends. First a run with every draft verified is recorded: its blocks are the
simulator's acceptance. Then, at each concurrency, one round in each mode is recorded, which corrects the step
table as the engine's own online correction would, and the rounds after it are measured. The simulator runs
the same prompts and answers' lengths, one step at a time, on the table as profiled and on the corrected one.
Writes benchmarks/results/NAME.json and NAME.png. Needs an otherwise idle machine.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from dspark_ray.cli.bench import print_rows
from dspark_ray.cli.common import load_config, prepare_torch
from dspark_ray.core.clock import SystemClock
from dspark_ray.core.step_record import read_steps
from dspark_ray.core.types import Request, SamplingParams
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.measure import TimedRun, timed_run, warm_up
from dspark_ray.engine.recorder import StepRecorder
from dspark_ray.models.fetch import resolve_model
from dspark_ray.models.prompts import read_prompts
from dspark_ray.models.tokenizer import Tokenizer
from dspark_ray.profiling.compare import build_contenders, kv_tokens_needed
from dspark_ray.profiling.machine import machine_facts, portable_config
from dspark_ray.scheduling.step_table import StepTable
from dspark_ray.simulator.calibrate import corrected_table
from dspark_ray.simulator.run import prepare, simulate
from dspark_ray.simulator.scenario import Scenario
from dspark_ray.simulator.workload import Batch

PROJECT_DIR = Path(__file__).resolve().parents[2]
RESULTS_DIR = PROJECT_DIR / "benchmarks" / "results"
FIGURES = ("tokens_per_s", "tpot_ms", "budget_tokens", "tau")


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=PROJECT_DIR / "configs" / "smollm2-135m-cpu.yaml")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--modes", nargs="+", default=["off", "adaptive"])
    parser.add_argument("--rounds", type=int, default=2, help="measured, after a recorded one")
    parser.add_argument("--limit", type=int, default=64, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--name", default="simulator-validation", help="of the result files")
    options = parser.parse_args()

    config = load_config(options.config)
    prepare_torch(config)
    model_dir = resolve_model(config.model.source)
    items = read_prompts(options.prompts, Tokenizer.load(model_dir), options.limit)
    prompts = [item.token_ids for item in items]
    kv_tokens = kv_tokens_needed(prompts, max(options.concurrency), options.max_tokens)
    names = list(dict.fromkeys(["fixed", *options.modes]))
    engines = build_contenders(config, model_dir, names, kv_tokens=kv_tokens)
    with tempfile.TemporaryDirectory() as folder:
        rows = _Validation(engines, prompts, options.max_tokens, Path(folder)).run(
            options.concurrency, options.modes, options.rounds
        )
    print_rows([_shown(row) for row in rows], "predicted on the corrected table / measured")
    arguments = [options.prompts.name if a == str(options.prompts) else a for a in sys.argv[1:]]
    result = {
        "command": shlex.join(["python", "benchmarks/simulator/validate.py", *arguments]),
        "machine": machine_facts(),
        "config": portable_config(config),
        "rows": rows,
    }
    _write(options.name, result)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row that fits into a terminal."""
    pairs = {figure: f"{row[f'{figure}_corrected']:.1f} / {row[figure]:.1f}" for figure in FIGURES}
    errors = {"error": f"{row['error_corrected']:+.1%}", "as profiled": f"{row['error_table']:+.1%}"}
    return {"requests": row["requests"], "mode": row["mode"], **pairs, **errors}


class _Validation:
    """Runs and predictions of one set of prompts."""

    def __init__(
        self, engines: dict[str, Engine], prompts: Sequence[Sequence[int]], max_tokens: int, folder: Path
    ) -> None:
        self._engines, self._prompts, self._folder = engines, prompts, folder
        self._sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        table = engines["fixed"].budget.table
        assert table is not None, "a profiled engine has a table"
        self._table = table

    def run(self, levels: Sequence[int], modes: Sequence[str], rounds: int) -> list[dict[str, Any]]:
        for engine in self._engines.values():
            warm_up(engine, list(self._prompts[0])[:32])
        acceptance = self._record("fixed", min(8, max(levels)))
        rows = []
        for level in levels:
            for mode in modes:
                steps = list(read_steps(self._record(mode, level)))
                gamma = self._engines[mode].config.speculation.num_draft_tokens
                corrected = corrected_table(self._table, steps, gamma)
                runs = [self._timed(mode, level) for _ in range(rounds)]
                measured = [_figures_of(run) for run in runs]
                row: dict[str, Any] = {"requests": level, "mode": mode}
                for name, table in (("table", self._table), ("corrected", corrected)):
                    predicted = self._predict(mode, level, table, acceptance, runs[0])
                    row |= {f"{figure}_{name}": predicted[figure] for figure in FIGURES}
                row |= {figure: median(one[figure] for one in measured) for figure in FIGURES}
                row["error_table"] = row["tokens_per_s_table"] / row["tokens_per_s"] - 1
                row["error_corrected"] = row["tokens_per_s_corrected"] / row["tokens_per_s"] - 1
                rows.append({**row, "measured_rounds": measured})
                print(
                    f"{level} requests, {mode}: measured {row['tokens_per_s']:.1f} tokens/s, predicted "
                    f"{row['tokens_per_s_table']:.1f} (table), "
                    f"{row['tokens_per_s_corrected']:.1f} (corrected)"
                )
        return rows

    def _record(self, mode: str, level: int) -> Path:
        """A run with a line a step; → the file."""
        engine = self._engines[mode]
        recorder = StepRecorder(self._folder, f"{mode}-{level}", SystemClock())
        engine.recorder = recorder
        try:
            self._timed(mode, level)
        finally:
            engine.recorder = None
        return recorder.path

    def _timed(self, mode: str, level: int) -> TimedRun:
        requests = [
            Request(f"prompt-{n}", tuple(prompt), self._sampling) for n, prompt in enumerate(self._prompts)
        ]
        return timed_run(self._engines[mode], requests, concurrency=level)

    def _predict(
        self, mode: str, level: int, table: StepTable, acceptance: Path, run: TimedRun
    ) -> dict[str, float]:
        """The same prompts and answers' lengths through the simulator."""
        config = self._engines[mode].config
        scenario = Scenario.model_validate(
            {
                "duration_s": 36_000,
                "replicas": [{"step_table": "measured", "engine": config.engine.model_dump()}],
                "speculation": {
                    "mode": config.speculation.mode,
                    "num_draft_tokens": config.speculation.num_draft_tokens,
                },
                "arrivals": {"kind": "closed", "clients": level},
                "tasks": [
                    {
                        "name": "prompts",
                        "prompt_tokens": {"mean": float(np.mean([len(p) for p in self._prompts]))},
                        "output_tokens": {"mean": run.num_tokens / len(run.completions)},
                        "acceptance": {"record": [str(acceptance)]},
                    }
                ],
                "law": "exact",
            }
        )
        count = len(run.completions)
        requests = Batch(
            np.zeros(count),
            np.array([len(prompt) for prompt in self._prompts]),
            np.array([len(completion.token_ids) for completion in run.completions]),
            np.zeros(count, dtype=np.int64),
        )
        setting = prepare(scenario, {"measured": table})
        figures = simulate(scenario, setting=setting, requests=requests).figures
        return {**figures, "tpot_ms": figures["tpot_ms"]["mean"]}


def _figures_of(run: TimedRun) -> dict[str, float]:
    tpots = [
        (done.ended_ms - done.first_token_ms) / (len(done.token_ids) - 1)
        for done in run.completions
        if len(done.token_ids) > 1
    ]
    return {
        "tokens_per_s": run.tokens_per_s,
        "tpot_ms": sum(tpots) / len(tpots),
        "budget_tokens": run.steps.mean_budget_tokens,
        "tau": run.counters.tau,
    }


def _write(name: str, result: dict[str, Any]) -> None:
    RESULTS_DIR.mkdir(parents=True, exist_ok=True)
    path = RESULTS_DIR / f"{name}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written to {path.relative_to(PROJECT_DIR)}")
    try:
        _plot(result["rows"], path.with_suffix(".png"))
    except ImportError:
        print('no plot: pip install -e ".[bench]"')


def _plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Measured and predicted, by requests in flight; one panel a figure."""
    from matplotlib import pyplot

    labels = {
        "tokens_per_s": "tokens/s",
        "tpot_ms": "TPOT, ms",
        "budget_tokens": "draft tokens verified a step",
    }
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for axis, (key, label) in zip(axes, labels.items(), strict=True):
        for index, mode in enumerate(dict.fromkeys(row["mode"] for row in rows)):
            mine = [row for row in rows if row["mode"] == mode]
            load, colour = [row["requests"] for row in mine], f"C{index}"
            axis.plot(load, [row[key] for row in mine], "o", color=colour, label=f"{mode}, measured")
            axis.plot(
                load, [row[f"{key}_corrected"] for row in mine], "-", color=colour, label=f"{mode}, predicted"
            )
            axis.plot(
                load,
                [row[f"{key}_table"] for row in mine],
                ":",
                color=colour,
                label=f"{mode}, profiled table",
            )
        axis.set_xscale("log", base=2)
        axis.set(xlabel="requests in flight", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)
    print(f"written to {path.relative_to(PROJECT_DIR)}")


if __name__ == "__main__":
    main()
