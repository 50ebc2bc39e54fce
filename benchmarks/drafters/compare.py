"""DSpark, DFlash and EAGLE-3, trained on the same texts for the same number of target tokens.

    python benchmarks/drafters/compare.py configs/training/smollm2-dspark-block7.yaml [--minutes 9]
        [--kinds dspark dflash eagle3] [--steps 1000] [--output runs/contest] [--prompts FILE.jsonl ...]
        [--limit 16] [--name drafters]

Runs for `--minutes` and stops; the same command continues until all kinds are finished. Then it prints τ and
acceptance by position at T = 1 and T = 0 on the held-out texts (teacher-forced, exact), with wall time and
parameters beside them, and for `--prompts` the same from the engine. Writes benchmarks/results/NAME.json
and NAME.png (`pip install -e ".[bench]"`).
"""

import argparse
import json
import logging
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dspark_ray.core.config import AppConfig, ModelConfig, SpeculationConfig
from dspark_ray.core.errors import ConfigError
from dspark_ray.core.types import SamplingParams, VerificationMode
from dspark_ray.engine.build import build_engine
from dspark_ray.models.drafters.checkpoint import load_checkpoint
from dspark_ray.models.fetch import resolve_model
from dspark_ray.models.prompts import read_prompts
from dspark_ray.models.tokenizer import Tokenizer
from dspark_ray.training.config import TrainingConfig, load_training_config
from dspark_ray.training.contest import KINDS, Contestant, hold_contest
from dspark_ray.training.evaluate import evaluate
from dspark_ray.training.plots import plot_acceptance
from dspark_ray.training.target import TransformersTarget

RESULTS_DIR = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
TEMPERATURES = (1.0, 0.0)


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, help="a DSpark training configuration: what all kinds share")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this chunk")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument(
        "--steps", type=int, help="optimizer steps of each kind; default: the configuration's"
    )
    parser.add_argument("--output", type=Path, help="folder of the runs; default: the configuration's")
    parser.add_argument("--prompts", type=Path, nargs="*", default=[])
    parser.add_argument("--limit", type=int, default=16, help="prompts of a file")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--name", default="drafters", help="of the result files")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    base = load_training_config(options.config, **({"output": options.output} if options.output else {}))
    if options.steps:
        optimizer = base.optimizer.model_copy(update={"total_steps": options.steps})
        base = base.model_copy(update={"optimizer": optimizer})
    if base.num_threads is not None:
        torch.set_num_threads(base.num_threads)
    ends = time.monotonic() + 60.0 * options.minutes
    standing = hold_contest(
        base, TransformersTarget(base.target), options.kinds, stop=lambda: time.monotonic() > ends
    )
    if unfinished := [c for c in standing if not c.finished]:
        steps = ", ".join(f"{c.kind} {c.steps}" for c in unfinished)
        print(f"not finished (steps: {steps} of {base.optimizer.total_steps}); run the same command again")
        return
    rows = [row for contestant in standing for row in _held_out_rows(contestant)]
    rows += [row for c in standing for row in _engine_rows(base, c, options)]
    _print(standing, rows)
    _write(options.name, {"contestants": [c.as_json() for c in standing], "rows": rows})


def _held_out_rows(contestant: Contestant) -> list[dict[str, Any]]:
    report = contestant.report
    assert report is not None
    figures = (
        (1.0, report.tau_sampling, report.acceptance_sampling),
        (0.0, report.tau_greedy, report.acceptance_greedy),
    )
    return [
        {
            "drafter": contestant.kind,
            "prompts": "held-out",
            "temperature": temperature,
            "report": {"tau": tau, "conditional_acceptance": acceptance},
        }
        for temperature, tau, acceptance in figures
    ]


def _engine_rows(
    base: TrainingConfig, contestant: Contestant, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The same from the engine, every draft verified, over whole answers."""
    if not options.prompts:
        return []
    found, _ = load_checkpoint(Path(contestant.checkpoint))
    drafter = {"kind": contestant.kind, "path": contestant.checkpoint}
    speculation = SpeculationConfig.model_validate(
        {"drafter": drafter, "mode": VerificationMode.FIXED, "num_draft_tokens": found.block_size}
    )
    config = AppConfig(model=ModelConfig(source=str(base.target)), speculation=speculation)
    model_dir = resolve_model(str(base.target))
    engine, tokenizer = build_engine(config, model_dir=model_dir), Tokenizer.load(model_dir)
    rows = []
    for path in options.prompts:
        prompts = [prompt.token_ids for prompt in read_prompts(path, tokenizer, options.limit)]
        for temperature in TEMPERATURES:
            sampling = SamplingParams(
                temperature=temperature, max_tokens=options.max_tokens, seed=0, shared_noise=False
            )
            report = evaluate(engine, prompts, sampling, concurrency=8).report()
            row = {"drafter": contestant.kind, "prompts": path.stem, "temperature": temperature}
            rows.append({**row, "report": report})
    return rows


def _print(standing: list[Contestant], rows: list[dict[str, Any]]) -> None:
    console = Console(width=140)
    made = Table("kind", "parameters (M)", "blocks", "wall s", title="trained on the same texts")
    for c in standing:
        made.add_row(c.kind, f"{c.num_parameters / 1e6:.2f}", str(c.blocks), f"{c.train_s:.0f}")
    console.print(made)
    table = Table("texts", "T", "kind", "τ", "against dspark", "acceptance by position")
    for row in sorted(rows, key=lambda r: (r["prompts"], -r["temperature"])):
        report = row["report"]
        alike = [r for r in rows if (r["prompts"], r["temperature"]) == (row["prompts"], row["temperature"])]
        best = next((r["report"]["tau"] for r in alike if r["drafter"] == "dspark"), float("nan"))
        by_position = " ".join("–" if v is None else f"{v:.2f}" for v in report["conditional_acceptance"])
        table.add_row(
            row["prompts"],
            f"{row['temperature']:g}",
            row["drafter"],
            f"{report['tau']:.3f}",
            f"{report['tau'] / best - 1:+.1%}",
            by_position,
        )
    console.print(table)


def _write(name: str, result: dict[str, Any]) -> None:
    RESULTS_DIR.mkdir(parents=True, exist_ok=True)
    path = RESULTS_DIR / f"{name}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written to {path}")
    try:
        plot_acceptance(result["rows"], path.with_suffix(".png"))
    except ConfigError as error:
        print(f"no plot: {error}")


if __name__ == "__main__":
    main()
