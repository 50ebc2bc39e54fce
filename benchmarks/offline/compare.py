"""Plain decoding against fixed, adaptive, Algorithm 1 and prompt look-up, at several numbers of requests.

    python benchmarks/offline/compare.py --prompts FILE.jsonl [--config configs/smollm2-135m-cpu.yaml]
        [--concurrency 1 8 32] [--rounds 3] [--limit 32] [--max-tokens 128] [--name offline]

Greedy, natural ends. Rounds are interleaved and every ratio is taken within its round; see
dspark_ray/profiling/compare.py for what is measured. Writes benchmarks/results/NAME.json and NAME.png. Needs
an otherwise idle machine, and `pip install -e ".[bench]"` for the plot.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from dspark_ray.cli.bench import print_rows, print_run
from dspark_ray.cli.common import load_config, prepare_torch
from dspark_ray.models.fetch import resolve_model
from dspark_ray.models.prompts import read_prompts
from dspark_ray.models.tokenizer import Tokenizer
from dspark_ray.profiling.compare import DEFAULT_VARIANTS, run_comparison

PROJECT_DIR = Path(__file__).resolve().parents[2]
RESULTS_DIR = PROJECT_DIR / "benchmarks" / "results"


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=PROJECT_DIR / "configs" / "smollm2-135m-cpu.yaml")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--variants", nargs="+", default=list(DEFAULT_VARIANTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=32, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--name", default="offline", help="of the result files")
    options = parser.parse_args()

    config = load_config(options.config)
    prepare_torch(config)
    model_dir = resolve_model(config.model.source)
    prompts = read_prompts(options.prompts, Tokenizer.load(model_dir), options.limit)
    result = run_comparison(
        config,
        model_dir,
        [prompt.token_ids for prompt in prompts],
        names=options.variants,
        concurrencies=options.concurrency,
        rounds=options.rounds,
        max_tokens=options.max_tokens,
        on_run=print_run,
    )
    print_rows(result["medians"])
    if rows := [row for row in result["ratios"] if row["system"] == "adaptive"]:
        print_rows(rows, "adaptive to the others, with 95% intervals")
    write(options.name, {"command": _command(options.prompts), "prompts": options.prompts.name, **result})


def write(name: str, result: dict[str, Any]) -> None:
    """The result files of one run."""
    RESULTS_DIR.mkdir(parents=True, exist_ok=True)
    path = RESULTS_DIR / f"{name}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written to {path.relative_to(PROJECT_DIR)}")
    try:
        plot(result, path.with_suffix(".png"))
    except ImportError:
        print('no plot: pip install -e ".[bench]"')


def plot(result: dict[str, Any], path: Path) -> None:
    """Tokens per second and the ratio to plain decoding, by number of requests; dots are the rounds."""
    from matplotlib import pyplot

    variants = list(dict.fromkeys(row["variant"] for row in result["medians"]))
    levels = sorted({row["concurrency"] for row in result["medians"]})
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axis, key, label in zip(
        axes, ("tokens_per_s", "ratio_to_off"), ("tokens/s", "ratio to off"), strict=True
    ):
        width = 0.8 / len(variants)
        for index, variant in enumerate(variants):
            places = [place + (index - (len(variants) - 1) / 2) * width for place in range(len(levels))]
            axis.bar(places, [_median(result, variant, n, key) for n in levels], width, label=variant)
            for place, level in zip(places, levels, strict=True):
                rounds = [
                    m[key]
                    for m in result["measurements"]
                    if m["variant"] == variant and m["concurrency"] == level
                ]
                axis.plot([place] * len(rounds), rounds, ".", color="black", markersize=3)
        axis.set_xticks(range(len(levels)), [str(level) for level in levels])
        axis.set_xlabel("requests in flight")
        axis.set_ylabel(label)
    axes[1].axhline(1.0, color="grey", linewidth=0.8)
    axes[0].legend(fontsize="small")
    machine = result["machine"]
    figure.suptitle(f"{result['config']['model']['id']}, {machine['hardware']}, {machine['threads']} threads")
    figure.savefig(path, dpi=120)
    print(f"written to {path.relative_to(PROJECT_DIR)}")


def _median(result: dict[str, Any], variant: str, concurrency: int, key: str) -> float:
    rows = [r for r in result["medians"] if r["variant"] == variant and r["concurrency"] == concurrency]
    return float(rows[0][key])


def _command(prompts: Path) -> str:
    """What was typed, with the prompts file by its name alone."""
    arguments = [prompts.name if argument == str(prompts) else argument for argument in sys.argv[1:]]
    return shlex.join(["python", "benchmarks/offline/compare.py", *arguments])


if __name__ == "__main__":
    main()
