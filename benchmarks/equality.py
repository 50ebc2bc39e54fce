"""Greedy text with drafting on equals greedy text with drafting off, token by token.

    python benchmarks/equality.py --prompts A.jsonl B.jsonl [--config configs/smollm2-135m-cpu.yaml]
        [--limit 50] [--max-tokens 128] [--concurrency 8] [--plain-concurrency 8] [--dtype float32]
        [--name equality]

`--limit` prompts are taken in turn from all files. The step table is a made-up steep one, so that `adaptive`
trims and its budget changes; a clock that stands still keeps live corrections out. Exits with 1 if a text
differs where the target's logits do not explain it, or if the comparison proves nothing (no drafts, none
accepted, nothing trimmed). In bfloat16 other systems' texts change with the batch; with `--dtype bfloat16
--plain-concurrency 1 --concurrency 32` this tells whether ours do. Writes benchmarks/results/NAME.json.
"""

import argparse
import json
import sys
from dataclasses import asdict
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from dspark_ray.cli.common import load_config, prepare_torch
from dspark_ray.engine.build import DTYPES
from dspark_ray.models.fetch import resolve_model
from dspark_ray.models.prompts import read_prompts
from dspark_ray.models.tokenizer import Tokenizer
from dspark_ray.profiling.equality import LOGIT_TOLERANCE, ModeReport, check_equality
from dspark_ray.profiling.machine import machine_facts
from dspark_ray.profiling.modes import build_modes

PROJECT_DIR = Path(__file__).resolve().parents[1]
RESULTS_DIR = PROJECT_DIR / "benchmarks" / "results"
MODES = ("fixed", "threshold", "algorithm1", "adaptive")


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--config", type=Path, default=PROJECT_DIR / "configs" / "smollm2-135m-cpu.yaml")
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--limit", type=int, default=50, help="prompts in all")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--plain-concurrency", type=int, help="of plain decoding; default: --concurrency")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--name", default="equality", help="of the result file")
    options = parser.parse_args()

    config = load_config(options.config)
    prepare_torch(config)
    model_dir = resolve_model(config.model.source)
    tokenizer = Tokenizer.load(model_dir)
    files = [[p.token_ids for p in read_prompts(path, tokenizer, options.limit)] for path in options.prompts]
    prompts = [p for p in chain.from_iterable(zip_longest(*files)) if p is not None][: options.limit]
    engines = build_modes(config, model_dir, ("off", *options.modes), options.dtype)
    reports = check_equality(
        engines.pop("off"),
        engines,
        prompts,
        max_tokens=options.max_tokens,
        concurrency=options.concurrency,
        plain_concurrency=options.plain_concurrency,
    )
    for report in reports:
        print(_line(report))
    result = {
        "machine": machine_facts(),
        "settings": {
            "prompts": [path.name for path in options.prompts],
            "num_prompts": len(prompts),
            "max_tokens": options.max_tokens,
            "dtype": options.dtype,
            "concurrency": options.concurrency,
            "plain_concurrency": options.plain_concurrency or options.concurrency,
            "tolerance": LOGIT_TOLERANCE,
        },
        "reports": [
            {**asdict(report), "verdict": report.verdict, "doubts": report.doubts} for report in reports
        ],
    }
    write(RESULTS_DIR / f"{options.name}.json", result)
    sys.exit(any(report.verdict != "equal" for report in reports))


def write(path: Path, result: dict[str, Any]) -> None:
    """The result file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path.relative_to(PROJECT_DIR)}")


def _line(report: ModeReport) -> str:
    excused = sum(difference.excused for difference in report.differences)
    return (
        f"{report.mode}: {report.verdict} on {report.num_texts} texts, {report.num_tokens} tokens; "
        f"drafted {report.drafted}, accepted {report.accepted}, trimmed {report.trimmed}, "
        f"{report.distinct_budgets} budgets; {len(report.differences)} differences, {excused} at near-ties"
        + "".join(f"; {doubt}" for doubt in report.doubts)
    )


if __name__ == "__main__":
    main()
