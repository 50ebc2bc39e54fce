"""The simulator against the engine: throughput, TPOT and budget at 1 to 64 requests.

    python benchmarks/simulator/validate.py --prompts FILE.jsonl [--config configs/smollm2-135m-cpu.yaml]
        [--concurrency 1 2 4 8 16 32 64] [--modes off adaptive] [--limit 64] [--max-tokens 96] [--rounds 2]

Greedy answers, natural ends, closed loops. First a run with every draft verified is recorded: its blocks are
the simulator's acceptance, its answers' lengths the simulator's. Then, at each concurrency and in each mode,
a round is recorded and the ones after it are measured. The records of a mode, of all concurrencies together,
say what steps take (`simulator/calibrate.py`). The simulator then runs the same prompts and lengths, one step
at a time: on the recorded times, with several seeds; on these without their scatter, to see what the noise of
step times does; and as profiled. What speculation gains is told against plain decoding on the same times. All
figures are of the steady part of a loop: after the first answers, while all places are taken. The budget is
the mean of draft tokens verified in a step that decodes.
Writes benchmarks/results/NAME.json and NAME.png. Needs an otherwise idle machine.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dspark_ray.cli.bench import print_rows
from dspark_ray.cli.common import load_config, prepare_torch
from dspark_ray.core.clock import SystemClock
from dspark_ray.core.step_record import RecordedStep, read_steps
from dspark_ray.core.types import Request, RequestOutput, SamplingParams, VerificationMode
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.measure import TimedRun, timed_run, warm_up
from dspark_ray.engine.offline import OnStep
from dspark_ray.engine.recent import StepRecord
from dspark_ray.engine.recorder import StepRecorder
from dspark_ray.models.fetch import resolve_model
from dspark_ray.models.prompts import read_prompts
from dspark_ray.models.tokenizer import Tokenizer
from dspark_ray.profiling.compare import build_contenders, kv_tokens_needed
from dspark_ray.profiling.machine import machine_facts, portable_config
from dspark_ray.simulator.calibrate import measured_times
from dspark_ray.simulator.run import prepare, simulate
from dspark_ray.simulator.scenario import Scenario
from dspark_ray.simulator.step_times import StepTimes
from dspark_ray.simulator.workload import Batch

PROJECT_DIR = Path(__file__).resolve().parents[2]
RESULTS_DIR = PROJECT_DIR / "benchmarks" / "results"
FIGURES = ("tokens_per_s", "tpot_ms", "budget_tokens", "tau")
WAYS = ("corrected", "calm", "table")  # recorded times; those without scatter; as profiled
SIMULATED_S, WARM_UP_S, SEEDS = 50.0, 10.0, 4
ANSWERS_AT_LEAST, ANSWERS_PER_CLIENT = 16, 5  # of a measured round; half of them, of the recorded one
MOST_ANSWERS_PER_S = 10  # that one simulated client can use up


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
    print_rows([_shown(row) for row in rows], "predicted on the recorded times / measured")
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
    shown = {}
    for figure in FIGURES:
        error = row.get(f"{figure}_error_corrected")
        told = "" if error is None else f" ({error:+.1%})"
        shown[figure] = f"{row[f'{figure}_corrected']:.2f} / {row[figure]:.2f}{told}"
    gain = f"{row['gain_corrected']:+.1%}" if "gain_corrected" in row else ""
    return {"requests": row["requests"], "mode": row["mode"], **shown, "gain": gain}


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
        self._gamma = engines["fixed"].config.speculation.num_draft_tokens

    def run(self, levels: Sequence[int], modes: Sequence[str], rounds: int) -> list[dict[str, Any]]:
        for engine in self._engines.values():
            warm_up(engine, list(self._prompts[0])[:32])
        self._acceptance, run = self._record("fixed", min(8, max(levels)), len(self._prompts))
        self._answers = [len(done.token_ids) for done in run.completions]
        records: dict[str, list[list[RecordedStep]]] = {mode: [] for mode in modes}
        measured: dict[tuple[int, str], list[dict[str, float]]] = {}
        for level in levels:
            count = max(ANSWERS_AT_LEAST, ANSWERS_PER_CLIENT * level)
            for mode in modes:
                path, _ = self._record(mode, level, -(-count // 2))
                records[mode].append(list(read_steps(path)))
                measured[level, mode] = [self._measured(mode, level, count) for _ in range(rounds)]
                print(f"{level} requests, {mode}: {measured[level, mode][0]['tokens_per_s']:.1f} tokens/s")
        times = {mode: measured_times(self._table, records[mode], self._gamma) for mode in modes}
        return [self._row(level, mode, times[mode], found) for (level, mode), found in measured.items()]

    def _row(
        self, level: int, mode: str, times: StepTimes, measured: list[dict[str, float]]
    ) -> dict[str, Any]:
        row: dict[str, Any] = {"requests": level, "mode": mode}
        row |= {figure: float(np.mean([one[figure] for one in measured])) for figure in FIGURES}
        ways = {
            "corrected": times,
            "calm": replace(times, scatter=np.zeros(0)),
            "table": StepTimes(self._table),
        }
        for way in WAYS:
            seeds = range(SEEDS if mode == "adaptive" and way == "corrected" else 1)
            runs = [self._predicted(mode, level, ways[way], seed) for seed in seeds]
            for figure in FIGURES:
                row[f"{figure}_{way}"] = float(np.mean([one[figure] for one in runs]))
                if row[figure]:
                    row[f"{figure}_error_{way}"] = row[f"{figure}_{way}"] / row[figure] - 1
            row[f"budget_tokens_runs_{way}"] = [one["budget_tokens"] for one in runs]
        if mode == "adaptive":
            plain = self._predicted(mode, level, times, 0, VerificationMode.OFF)["tokens_per_s"]
            row["gain_corrected"] = row["tokens_per_s_corrected"] / plain - 1
        return {**row, "measured_rounds": measured}

    def _record(self, mode: str, level: int, count: int) -> tuple[Path, TimedRun]:
        """A run with a line a step; → the file, and the run."""
        engine = self._engines[mode]
        recorder = StepRecorder(self._folder, f"{mode}-{level}-{count}", SystemClock())
        engine.recorder = recorder
        try:
            return recorder.path, self._timed(mode, level, count, None)
        finally:
            engine.recorder = None

    def _timed(self, mode: str, level: int, count: int, on_step: OnStep | None) -> TimedRun:
        """`count` answers, the prompts over and over."""
        requests = [
            Request(f"prompt-{n}", tuple(self._prompts[n % len(self._prompts)]), self._sampling)
            for n in range(count)
        ]
        return timed_run(self._engines[mode], requests, concurrency=level, on_step=on_step)

    def _measured(self, mode: str, level: int, count: int) -> dict[str, float]:
        """The steady part: from the answer with which the first places have been taken anew to the last
        request's submission."""
        engine = self._engines[mode]
        steps: list[tuple[StepRecord, int]] = []

        def note(outputs: list[RequestOutput]) -> None:
            if outputs:
                emitted = sum(len(output.token_ids) for output in outputs)
                steps.append((engine.recent_steps()[-1], emitted))

        done = self._timed(mode, level, count, note).completions
        from_ms = sorted(one.ended_ms for one in done)[level - 1]
        until_ms = max(one.submitted_ms for one in done)
        inside = [(step, emitted) for step, emitted in steps if from_ms < step.ended_ms <= until_ms]
        decoding = [step for step, _ in inside if step.num_decoding]
        tpots = [
            (one.ended_ms - one.first_token_ms) / (len(one.token_ids) - 1)
            for one in done
            if len(one.token_ids) > 1 and from_ms < one.ended_ms <= until_ms
        ]
        tokens = sum(emitted for _, emitted in inside)
        first_tokens = sum(from_ms < one.first_token_ms <= until_ms for one in done)
        return {
            "tokens_per_s": 1e3 * tokens / (until_ms - from_ms),
            "tpot_ms": sum(tpots) / len(tpots),
            "budget_tokens": sum(step.budget_tokens for step in decoding) / len(decoding),
            "tau": (tokens - first_tokens) / sum(step.num_decoding for step in decoding),
            "decoding_steps": float(len(decoding)),
        }

    def _predicted(
        self, mode: str, level: int, times: StepTimes, seed: int, verified: VerificationMode | None = None
    ) -> dict[str, float]:
        """The same prompts and answers' lengths through the simulator, over and over; `verified`: in another
        mode than the one that was recorded."""
        config = self._engines[mode].config
        prompts = np.array([len(prompt) for prompt in self._prompts])
        scenario = Scenario.model_validate(
            {
                "duration_s": SIMULATED_S,
                "warm_up_s": WARM_UP_S,
                "seed": seed,
                "replicas": [{"step_table": "measured", "engine": config.engine.model_dump()}],
                "speculation": {
                    "mode": verified or config.speculation.mode,
                    "num_draft_tokens": config.speculation.num_draft_tokens,
                },
                "arrivals": {"kind": "closed", "clients": level},
                "tasks": [
                    {
                        "name": "prompts",
                        "prompt_tokens": {"mean": float(prompts.mean())},
                        "output_tokens": {
                            "mean": float(np.mean(self._answers)),
                            "most": self._sampling.max_tokens,
                        },
                        "acceptance": {"record": [str(self._acceptance)]},
                    }
                ],
                "law": "exact",
            }
        )
        rounds = 1 + int(SIMULATED_S * MOST_ANSWERS_PER_S * level / len(prompts))
        count = rounds * len(prompts)
        requests = Batch(
            np.zeros(count),
            np.tile(prompts, rounds),
            np.tile(np.array(self._answers), rounds),
            np.zeros(count, dtype=np.int64),
        )
        setting = prepare(scenario, {"measured": self._table}, {"measured": times})
        figures = simulate(scenario, setting=setting, requests=requests).figures
        return {**figures, "tpot_ms": figures["tpot_ms"]["mean"]}


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
                label=f"{mode}, as profiled",
            )
            runs = [row.get(f"{key}_runs_corrected") for row in mine]
            if all(runs):  # of several seeds: how far apart a loop's own chances put them
                low, high = zip(*((min(one), max(one)) for one in runs), strict=True)
                axis.fill_between(load, low, high, color=colour, alpha=0.15)
        axis.set_xscale("log", base=2)
        axis.set(xlabel="requests in flight", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)
    print(f"written to {path.relative_to(PROJECT_DIR)}")


if __name__ == "__main__":
    main()
