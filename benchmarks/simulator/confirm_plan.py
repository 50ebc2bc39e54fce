"""A planner's answer about this machine, and what a real run makes of it: requests a second at a TPOT.

    python benchmarks/simulator/confirm_plan.py --prompts FILE.jsonl [--tpot 25]
        [--config configs/smollm2-135m-cpu.yaml] [--mode adaptive] [--shares 0.92 1.0 1.08]
        [--seconds 40] [--limit 64] [--max-tokens 48]

First the engine runs the prompts in closed loops: with every draft verified (the drafts' outcomes), and in
`--mode` with few and with many clients (what steps of all sizes take now). The planner gets the step table
and these times, the acceptance, and the lengths of the prompts and of their answers. Its answer is the rate
of random arrivals at which one replica keeps the mean TPOT. Then the engine runs open loops at shares of
that rate, arrivals at random, each `--seconds` long, greedy; every run is foretold twice: by the planner, and
by the simulator with the same arrivals. The measured answer is the rate at which the planner's curve of TPOT
by rate meets the target once it is scaled to all runs (by the mean ratio of measured to planned TPOT): one
run near saturation is a small sample of a queue.
Writes benchmarks/results/NAME.json and NAME.png. Needs an otherwise idle machine.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_ray.cli.bench import print_rows
from dspark_ray.cli.common import load_config, prepare_torch
from dspark_ray.core.clock import SystemClock
from dspark_ray.core.step_record import read_steps
from dspark_ray.core.types import Request, SamplingParams, VerificationMode
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.measure import TimedRun, timed_run, warm_up
from dspark_ray.engine.recorder import StepRecorder
from dspark_ray.models.fetch import resolve_model
from dspark_ray.models.prompts import read_prompts
from dspark_ray.models.tokenizer import Tokenizer
from dspark_ray.profiling.compare import build_contenders, kv_tokens_needed
from dspark_ray.profiling.machine import machine_facts, portable_config
from dspark_ray.scheduling.step_table import StepTable
from dspark_ray.simulator.calibrate import measured_times
from dspark_ray.simulator.capacity import Carried, ReplicaCapacity
from dspark_ray.simulator.planner import Candidate, capacity, curve
from dspark_ray.simulator.run import prepare, simulate
from dspark_ray.simulator.scenario import Scenario

PROJECT_DIR = Path(__file__).resolve().parents[2]
RESULTS_DIR = PROJECT_DIR / "benchmarks" / "results"
CLOSED_CLIENTS = (2, 8, 16, 28)  # of the runs that the planner learns step times from
ANSWERS_AT_LEAST, ANSWERS_PER_CLIENT = 8, 2.5  # of each
ACCEPTANCE_CLIENTS = 8  # of the run that it learns the drafts' outcomes from
WARM_UP_SHARE = 0.15  # of a run's time: its first requests find an empty replica
FIGURES = ("requests_per_s", "tpot_ms", "goodput_tokens_per_s", "budget_tokens")


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=PROJECT_DIR / "configs" / "smollm2-135m-cpu.yaml")
    parser.add_argument("--mode", choices=["off", "fixed", "adaptive"], default="adaptive")
    parser.add_argument("--tpot", type=float, default=25.0, help="ms, mean over requests")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.92, 1.0, 1.08], help="of the answer")
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals at each rate")
    parser.add_argument("--limit", type=int, default=64, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--name", default="plan-confirmed", help="of the result files")
    options = parser.parse_args()

    config = load_config(options.config)
    prepare_torch(config)
    model_dir = resolve_model(config.model.source)
    prompts = [
        item.token_ids for item in read_prompts(options.prompts, Tokenizer.load(model_dir), options.limit)
    ]
    kv_tokens = kv_tokens_needed(prompts, config.engine.max_running, options.max_tokens)
    names = list(dict.fromkeys(["fixed", options.mode]))
    engines = build_contenders(config, model_dir, names, kv_tokens=kv_tokens)
    with tempfile.TemporaryDirectory() as folder:
        trial = _Trial(engines, options.mode, prompts, options.max_tokens, options.tpot, Path(folder))
        planned = trial.plan()
        print(
            f"planned: {planned.rate_per_s:.2f} requests/s at a TPOT of {planned.tpot_ms:.1f} ms, "
            f"{planned.requests:.1f} decoding, {planned.budget_tokens:.1f} draft tokens a step"
        )
        rows = [
            trial.confirm(share * planned.rate_per_s, options.seconds, seed)
            for seed, share in enumerate(sorted(options.shares))
        ]
        measured = trial.measured_rate(rows)
        line = trial.line(1.3 * max(row["rate_per_s"] for row in rows))
    print_rows([_shown(row) for row in rows], "planner / simulator with the same arrivals / measured")
    error = None if measured is None else planned.rate_per_s / measured - 1
    found = "not reached" if measured is None else f"{measured:.2f} ({error:+.1%})"
    print(f"requests/s at a TPOT of {options.tpot:g} ms: planned {planned.rate_per_s:.2f}, measured {found}")
    arguments = [options.prompts.name if a == str(options.prompts) else a for a in sys.argv[1:]]
    result = {
        "command": shlex.join(["python", "benchmarks/simulator/confirm_plan.py", *arguments]),
        "machine": machine_facts(),
        "config": portable_config(config),
        "tpot_ms": options.tpot,
        "planned_requests_per_s": planned.rate_per_s,
        "measured_requests_per_s": measured,
        "error": error,
        "rows": rows,
        "line": line,
    }
    _write(options.name, result)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row that fits into a terminal."""
    shown = {
        figure: f"{row[f'{figure}_planned']:.1f} / {row[f'{figure}_simulated']:.1f} / {row[figure]:.1f}"
        for figure in FIGURES
        if figure != "goodput_tokens_per_s"
    }
    goodput = f"{row['goodput_tokens_per_s_simulated']:.1f} / {row['goodput_tokens_per_s']:.1f}"
    return {"rate": f"{row['rate_per_s']:.2f}", **shown, "good tok/s": goodput}


class _Trial:
    """The planner and the engine on one set of prompts."""

    def __init__(
        self,
        engines: dict[str, Engine],
        mode: str,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        tpot_ms: float,
        folder: Path,
    ) -> None:
        self._engines, self._mode, self._prompts, self._folder = engines, mode, prompts, folder
        self._sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self._tpot_ms = tpot_ms
        self._capacity: ReplicaCapacity | None = None

    def plan(self) -> Carried:
        """The planner's answer, after what it must know has been recorded."""
        for engine in self._engines.values():
            warm_up(engine, list(self._prompts[0])[:32])
        fixed = self._engines["fixed"]
        table = fixed.budget.table
        assert table is not None, "a profiled engine has a table"
        self._table: StepTable = table
        self._acceptance, run = self._recorded("fixed", ACCEPTANCE_CLIENTS, len(self._prompts))
        self._answers = [len(done.token_ids) for done in run.completions]
        records = [
            self._recorded(self._mode, clients, max(ANSWERS_AT_LEAST, round(ANSWERS_PER_CLIENT * clients)))
            for clients in CLOSED_CLIENTS
        ]
        gamma = fixed.config.speculation.num_draft_tokens
        self._times = measured_times(table, [list(read_steps(path)) for path, _ in records], gamma)
        scenario = self._scenario({"kind": "poisson", "rate_per_s": 1.0})
        setting = prepare(scenario, {"measured": self._table}, {"measured": self._times})
        candidate = Candidate(self._mode, VerificationMode(self._mode))
        self._capacity = capacity(scenario, setting, curve(scenario, setting, candidate))
        most = self._capacity.most(self._tpot_ms)
        if most is None:
            sys.exit(
                f"a single request is slower than {self._tpot_ms:g} ms a token here: name another --tpot"
            )
        return most

    def confirm(self, rate: float, seconds: float, seed: int) -> dict[str, Any]:
        """One open loop at `rate` requests a second, as planned, simulated and measured."""
        count = max(round(rate * seconds), 10)
        # Poisson arrivals, given that there are just so many: the rate is what it is called.
        times = np.sort(np.random.default_rng(seed).random(count)) * count / rate
        order = np.random.default_rng([seed, 1]).integers(len(self._prompts), size=count)
        assert self._capacity is not None, "plan first"
        carried = self._capacity.at(rate)
        run = self._run(self._mode, [int(i) for i in order], 1e3 * times)
        measured = _figures_of(run, times, self._tpot_ms)
        simulated = self._simulated(times, order)
        row = {"rate_per_s": rate, "requests": count, **measured}
        row |= {f"{figure}_simulated": simulated[figure] for figure in FIGURES}
        row |= {
            "requests_per_s_planned": rate,
            "tpot_ms_planned": carried.tpot_ms,
            "budget_tokens_planned": carried.budget_tokens,
        }
        print(
            f"{rate:.2f} requests/s: TPOT planned {carried.tpot_ms:.1f}, "
            f"simulated {simulated['tpot_ms']:.1f}, measured {measured['tpot_ms']:.1f} ms"
        )
        return row

    def measured_rate(self, rows: Sequence[dict[str, Any]]) -> float | None:
        """Requests a second at the target, by the planner's curve scaled to the runs; None if even a request
        alone is slower then."""
        assert self._capacity is not None, "plan first"
        ratio = np.exp(np.mean([np.log(row["tpot_ms"] / row["tpot_ms_planned"]) for row in rows]))
        found = self._capacity.most(self._tpot_ms / float(ratio))
        return None if found is None else found.rate_per_s

    def line(self, most_rate: float) -> list[dict[str, float]]:
        """The planner's TPOT and budget by rate, for the plot."""
        assert self._capacity is not None, "plan first"
        found = [self._capacity.at(rate) for rate in np.linspace(0.1, most_rate, 40)]
        return [
            {"rate_per_s": one.rate_per_s, "tpot_ms": one.tpot_ms, "budget_tokens": one.budget_tokens}
            for one in found
        ]

    def _recorded(self, name: str, clients: int, count: int) -> tuple[Path, TimedRun]:
        """A closed loop of `count` answers, with a line a step."""
        engine = self._engines[name]
        engine.recorder = StepRecorder(self._folder, f"{name}-{clients}", SystemClock())
        path = engine.recorder.path
        order = [number % len(self._prompts) for number in range(count)]
        try:
            return path, self._run(name, order, None, clients)
        finally:
            engine.recorder = None

    def _run(
        self, name: str, order: Sequence[int], arrivals_ms: Sequence[float] | None, clients: int | None = None
    ) -> TimedRun:
        requests = [
            Request(f"request-{number}", tuple(self._prompts[index]), self._sampling)
            for number, index in enumerate(order)
        ]
        concurrency = clients or len(requests)
        return timed_run(self._engines[name], requests, concurrency=concurrency, arrivals_ms=arrivals_ms)

    def _simulated(self, times: np.ndarray, order: np.ndarray) -> dict[str, float]:
        """The same requests at the same times through the simulator."""
        log = self._folder / "arrivals.jsonl"
        lines = [
            {
                "arrived_ms": 1e3 * float(time),
                "prompt_tokens": len(self._prompts[index]),
                "output_tokens": self._answers[index],
            }
            for time, index in zip(times, order, strict=True)
        ]
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
        arrivals = {"kind": "replay", "log": str(log)}
        first_s, last_s = float(times[0]), float(times[-1])  # a replayed log begins with its first request
        scenario = self._scenario(arrivals, last_s - first_s, WARM_UP_SHARE * (last_s - first_s))
        setting = prepare(scenario, {"measured": self._table}, {"measured": self._times})
        figures = simulate(scenario, setting=setting).figures
        return {**figures, "tpot_ms": figures["tpot_ms"]["mean"]}

    def _scenario(
        self, arrivals: dict[str, Any], duration_s: float = 600.0, warm_up_s: float = 0.0
    ) -> Scenario:
        config = self._engines[self._mode].config
        return Scenario.model_validate(
            {
                "duration_s": duration_s,
                "warm_up_s": warm_up_s,
                "replicas": [{"step_table": "measured", "engine": config.engine.model_dump()}],
                "speculation": {
                    "mode": config.speculation.mode,
                    "num_draft_tokens": config.speculation.num_draft_tokens,
                },
                "arrivals": arrivals,
                "tasks": [
                    {
                        "name": "prompts",
                        "prompt_tokens": {"values": [len(prompt) for prompt in self._prompts]},
                        "output_tokens": {"values": self._answers, "most": self._sampling.max_tokens},
                        "acceptance": {"record": [str(self._acceptance)]},
                    }
                ],
                "slo": {"ttft_ms": 2000.0, "tpot_ms": self._tpot_ms},
                "law": "exact",
            }
        )


def _figures_of(run: TimedRun, times: np.ndarray, tpot_ms: float) -> dict[str, float]:
    """What the simulator says of its own runs, of a real one: of the requests that ended while others came,
    without the first ones."""
    done = run.completions
    first_ms = done[0].submitted_ms
    span_ms = 1e3 * float(times[-1] - times[0])
    from_ms, until_ms = first_ms + WARM_UP_SHARE * span_ms, first_ms + span_ms
    judged = [one for one in done if from_ms <= one.ended_ms <= until_ms]
    seconds = (until_ms - from_ms) / 1e3
    tpots = {
        one.request_id: (one.ended_ms - one.first_token_ms) / (len(one.token_ids) - 1)
        for one in judged
        if len(one.token_ids) > 1
    }
    good = [
        one
        for one in judged
        if tpots.get(one.request_id, 0.0) <= tpot_ms and one.first_token_ms - one.submitted_ms <= 2000.0
    ]
    return {
        "requests_per_s": len(judged) / seconds,
        "tpot_ms": sum(tpots.values()) / len(tpots),
        "goodput_tokens_per_s": sum(len(one.token_ids) for one in good) / seconds,
        "budget_tokens": run.steps.mean_budget_tokens,
        "tau": run.counters.tau,
    }


def _write(name: str, result: dict[str, Any]) -> None:
    RESULTS_DIR.mkdir(parents=True, exist_ok=True)
    path = RESULTS_DIR / f"{name}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written to {path.relative_to(PROJECT_DIR)}")
    try:
        _plot(result, path.with_suffix(".png"))
    except ImportError:
        print('no plot: pip install -e ".[bench]"')


def _plot(result: dict[str, Any], path: Path) -> None:
    """TPOT, goodput and budget by rate: the planner's line, the simulator's points, the measured ones."""
    from matplotlib import pyplot

    rows, line = result["rows"], result["line"]
    rates = [row["rate_per_s"] for row in rows]
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for axis, (key, label) in zip(
        axes,
        {
            "tpot_ms": "TPOT, ms",
            "goodput_tokens_per_s": "good tokens/s",
            "budget_tokens": "draft tokens verified a step",
        }.items(),
        strict=True,
    ):
        if key in line[0]:
            known = [one for one in line if one["tpot_ms"] < 3 * result["tpot_ms"]]
            axis.plot([one["rate_per_s"] for one in known], [one[key] for one in known], label="planned")
        axis.plot(rates, [row[f"{key}_simulated"] for row in rows], "x", label="simulated, same arrivals")
        axis.plot(rates, [row[key] for row in rows], "o", color="C3", label="measured")
        axis.set(xlabel="requests/s", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].axhline(result["tpot_ms"], color="grey", linewidth=0.8, linestyle="--")
    axes[0].axvline(result["planned_requests_per_s"], color="C0", linewidth=0.8, linestyle="--")
    if result["measured_requests_per_s"] is not None:
        axes[0].axvline(result["measured_requests_per_s"], color="C3", linewidth=0.8, linestyle="--")
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)
    print(f"written to {path.relative_to(PROJECT_DIR)}")


if __name__ == "__main__":
    main()
