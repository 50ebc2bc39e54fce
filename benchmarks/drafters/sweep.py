"""Drafters of several depths and block lengths, and what the sequential head costs (figures 3 and 4).

    python benchmarks/drafters/sweep.py configs/training/smollm2-dspark-block7.yaml [--minutes 20]
        [--depths 1 2 4] [--lengths 4 7 15] [--steps 150] [--output runs/sweep] [--name drafter-sweep]

Trains DSpark and DFlash at each depth (at the configuration's block length) and at each block length (at its
depth), all on the same texts, for `--minutes`; the same command continues until all are finished. Then it
prints τ on the held-out texts (teacher-forced, exact) and times a block with and without the sequential head,
as a share of a round: drafting and verifying one block of each request. Writes benchmarks/results/NAME.json
and NAME.png (`pip install -e ".[bench]"`).
"""

import argparse
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from dspark_ray.core.clock import SystemClock
from dspark_ray.core.config import AppConfig, ModelConfig, SpeculationConfig
from dspark_ray.core.errors import ConfigError
from dspark_ray.core.types import VerificationMode
from dspark_ray.engine.build import build_engine
from dspark_ray.engine.engine import Engine
from dspark_ray.profiling.machine import machine_facts
from dspark_ray.profiling.step_timer import StepTimer
from dspark_ray.training.config import TrainingConfig, load_training_config
from dspark_ray.training.contest import Contestant, train_in_turn
from dspark_ray.training.plots import plot_sweep
from dspark_ray.training.sweep import sweep_configs
from dspark_ray.training.target import TransformersTarget

RESULTS_DIR = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
REQUESTS = (1, 8, 32)
REPLAYS = 9
CONTEXT_TOKENS = 256


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, help="a DSpark training configuration: what all share")
    parser.add_argument("--minutes", type=float, default=20.0, help="of this chunk")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4, 7, 15])
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of each")
    parser.add_argument("--output", type=Path, default=Path("runs/sweep"), help="folder of the runs")
    parser.add_argument("--name", default="drafter-sweep", help="of the result files")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    base = load_training_config(options.config, output=options.output)
    warmup = min(base.optimizer.warmup_steps, options.steps // 8)
    optimizer = base.optimizer.model_copy(update={"total_steps": options.steps, "warmup_steps": warmup})
    base = base.model_copy(update={"optimizer": optimizer})
    if base.num_threads is not None:
        torch.set_num_threads(base.num_threads)
    ends = time.monotonic() + 60.0 * options.minutes
    configs = sweep_configs(base, options.depths, options.lengths)
    standing = train_in_turn(configs, TransformersTarget(base.target), stop=lambda: time.monotonic() > ends)
    if unfinished := [c.name for c in standing if not c.finished]:
        print(f"not finished: {', '.join(unfinished)}; run the same command again")
        return
    depth = base.architecture.num_layers
    heads = [
        figures
        for c in standing
        if c.kind == "dspark" and c.num_layers == depth
        for figures in _head_costs(base, c)
    ]
    rows = [contestant.as_json() for contestant in standing]
    _print(rows, heads)
    result = {
        "machine": machine_facts(),
        "steps": options.steps,
        "depth": depth,
        "block_size": base.architecture.block_size,
        "drafters": rows,
        "sequential_head": heads,
    }
    _write(options.name, result)


def _head_costs(base: TrainingConfig, contestant: Contestant) -> list[dict[str, Any]]:
    """Milliseconds of a block with and without the sequential head, and of verifying; medians, in turn."""
    checkpoint, block_size = Path(contestant.checkpoint), contestant.block_size
    with tempfile.TemporaryDirectory() as folder:
        _strip_head(checkpoint, Path(folder))
        timers = {
            name: StepTimer(_engine(base, path, block_size), SystemClock())
            for name, path in (("with_ms", checkpoint), ("without_ms", Path(folder)))
        }
    found = []
    for requests in REQUESTS:
        step = timers["with_ms"].target_step(requests * (1 + block_size), CONTEXT_TOKENS, requests)
        times: dict[str, list[float]] = {"with_ms": [], "without_ms": [], "verify_ms": []}
        for _ in range(1 + REPLAYS):  # the first warms up
            for name, timer in timers.items():
                times[name].append(timer.draft_ms(requests, CONTEXT_TOKENS))
            times["verify_ms"].append(timers["with_ms"].verify_ms(step))
        median = {name: statistics.median(values[1:]) for name, values in times.items()}
        round_ms = median["with_ms"] + median["verify_ms"]
        share = (median["with_ms"] - median["without_ms"]) / round_ms
        rounded = {name: round(value, 3) for name, value in median.items()}
        found.append({"block_size": block_size, "requests": requests, **rounded, "share": round(share, 4)})
    return found


def _engine(base: TrainingConfig, checkpoint: Path, block_size: int) -> Engine:
    speculation = SpeculationConfig.model_validate(
        {
            "drafter": {"kind": "dspark", "path": str(checkpoint)},
            "mode": VerificationMode.FIXED,
            "num_draft_tokens": block_size,
            "canary": False,
        }
    )
    config = AppConfig(model=ModelConfig(source=str(base.target)), speculation=speculation)
    return build_engine(config, model_dir=base.target)


def _strip_head(checkpoint: Path, folder: Path) -> None:
    """A copy without the sequential head; its confidences read the hidden states alone."""
    tensors = load_file(checkpoint / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    name = "confidence_head.proj.weight"
    tensors[name] = tensors[name][:, : config["hidden_size"]].contiguous()
    kept = {key: tensor for key, tensor in tensors.items() if not key.startswith("markov_head.")}
    config |= {"markov_rank": 0, "confidence_head_with_markov": False}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _print(rows: list[dict[str, Any]], heads: list[dict[str, Any]]) -> None:
    console = Console(width=140)
    table = Table("kind", "layers", "block", "parameters (M)", "blocks", "wall s", "τ at T = 1", "τ at T = 0")
    for row in rows:
        report = row["report"]
        figures = (report["tau_sampling"], report["tau_greedy"])
        table.add_row(
            *(row["kind"], str(row["num_layers"]), str(row["block_size"])),
            *(f"{row['num_parameters'] / 1e6:.2f}", str(row["blocks"]), f"{row['train_s']:.0f}"),
            *(f"{value:.3f}" for value in figures),
        )
    console.print(table)
    table = Table(
        "block", "requests", "block ms", "without the head", "verifying ms", "head's share of a round"
    )
    for head in heads:
        times = (head["with_ms"], head["without_ms"], head["verify_ms"])
        numbers = (str(head["block_size"]), str(head["requests"]))
        table.add_row(*numbers, *(f"{value:.2f}" for value in times), f"{head['share']:.1%}")
    console.print(table)


def _write(name: str, result: dict[str, Any]) -> None:
    RESULTS_DIR.mkdir(parents=True, exist_ok=True)
    path = RESULTS_DIR / f"{name}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written to {path}")
    try:
        plot_sweep(
            result["drafters"],
            result["sequential_head"],
            path.with_suffix(".png"),
            depth=result["depth"],
            block=result["block_size"],
        )
    except ConfigError as error:
        print(f"no plot: {error}")


if __name__ == "__main__":
    main()
