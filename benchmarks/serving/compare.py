"""Servers side by side over HTTP: the same prompts, the same client, one awake at a time, rounds interleaved.

    python benchmarks/serving/compare.py --prompts FILE.jsonl [--systems "dspark-ray adaptive" "vllm plain"]
        [--concurrency 1 8 32] [--rounds 3] [--limit 64] [--max-tokens 128]
        [--set VLLM_VENV=DIR MODEL_DIR=DIR]

systems.yaml says how each is started. All are started before anything is measured and paused (SIGSTOP) while
another one is; the order rotates from round to round and ratios are taken within a round, to the first
system. Greedy, natural ends.
Writes benchmarks/results/NAME.json and NAME.png. Needs an otherwise idle machine.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from statistics import median
from typing import Any

from servers import Server, awake, load_systems, running

from dspark_ray.models.prompts import RawPrompt, read_raw_prompts
from dspark_ray.profiling.load import drive, find_model
from dspark_ray.profiling.machine import machine_facts

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER.parent / "results"
WARM_UP_PROMPTS = 4
FIGURES = ("tokens_per_s", "ratio", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--file", type=Path, default=FOLDER / "systems.yaml")
    parser.add_argument("--systems", nargs="+", help="names in the file; default: all")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=64, help="prompts of a round; at one request a quarter")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="variables of the commands"
    )
    parser.add_argument("--name", default="serving", help="of the result files")
    options = parser.parse_args()

    prompts = read_raw_prompts(options.prompts, options.limit)
    base, systems = load_systems(options.file, options.systems)
    variables = dict(item.split("=", 1) for item in options.set)
    rows: list[dict[str, Any]] = []
    with running(systems, base, variables) as servers:
        for server in servers:
            with awake(server):
                measure(server, prompts[:WARM_UP_PROMPTS], 2, options.max_tokens)
        for level in options.concurrency:
            chosen = prompts if level > 1 else prompts[: max(len(prompts) // 4, 1)]
            for number in range(options.rounds):
                rows += measure_round(servers, chosen, level, options.max_tokens, number)
    medians = summarise(rows)
    result = {
        "command": _command(options.prompts),
        "machine": machine_facts(),
        "systems": [system.model_dump(exclude={"port"}) for system in systems],
        "medians": medians,
        "rounds": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{options.name}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for row in medians:
        print(json.dumps(row, ensure_ascii=False))
    plot(medians, path.with_suffix(".png"))


def measure_round(
    servers: list[Server], prompts: list[RawPrompt], level: int, max_tokens: int, number: int
) -> list[dict[str, Any]]:
    """One run of every server, beginning with another one each time."""
    first = number % len(servers)
    rows = []
    for server in servers[first:] + servers[:first]:
        with awake(server):
            row = measure(server, prompts, level, max_tokens)
        rows.append({"system": server.system.name, "round": number, **row})
        print(
            f"{level} requests, round {number + 1}: {server.system.name} {row['tokens_per_s']:.1f} tokens/s",
            flush=True,
        )
    reference = next(r["tokens_per_s"] for r in rows if r["system"] == servers[0].system.name)
    return [{**row, "ratio": row["tokens_per_s"] / reference} for row in rows]


def measure(server: Server, prompts: list[RawPrompt], level: int, max_tokens: int) -> dict[str, Any]:
    """The client's figures and the server's CPU seconds for one pass over the prompts."""
    before = server.cpu_seconds()
    report = drive(server.url, find_model(server.url), prompts, concurrency=level, max_tokens=max_tokens)
    after = server.cpu_seconds()
    used = {name: round(seconds - before.get(name, 0.0), 2) for name, seconds in after.items()}
    return report.figures() | {"cpu_s": {name: seconds for name, seconds in used.items() if seconds >= 0.05}}


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over the rounds, with the lowest and highest ratio."""
    keys = dict.fromkeys((row["concurrency"], row["system"]) for row in rows)
    medians = []
    for level, name in keys:
        group = [r for r in rows if (r["concurrency"], r["system"]) == (level, name)]
        ratios = [row["ratio"] for row in group]
        values = {key: round(median(row[key] for row in group if row[key] is not None), 3) for key in FIGURES}
        errors = sum(row["errors"] for row in group)
        spread = [round(min(ratios), 3), round(max(ratios), 3)]
        medians.append(
            {"concurrency": level, "system": name, **values, "ratio_range": spread, "errors": errors}
        )
    return medians


def plot(medians: list[dict[str, Any]], path: Path) -> None:
    """Throughput against the speed that each user sees; one line a system, one point a number of requests."""
    try:
        from matplotlib import pyplot
    except ImportError:
        print('no plot: pip install -e ".[bench]"')
        return
    figure, axis = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name in dict.fromkeys(row["system"] for row in medians):
        points = [row for row in medians if row["system"] == name]
        speeds = [1e3 / row["tpot_p50_ms"] for row in points]
        axis.plot(speeds, [row["tokens_per_s"] for row in points], "o-", label=name)
        for speed, row in zip(speeds, points, strict=True):
            axis.annotate(
                str(row["concurrency"]),
                (speed, row["tokens_per_s"]),
                xytext=(4, 4),
                textcoords="offset points",
            )
    axis.set_xlabel("tokens/s a user sees (median)")
    axis.set_ylabel("tokens/s of the server")
    axis.legend(fontsize="small")
    axis.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)


def _command(prompts: Path) -> str:
    """What was typed, files by their names alone, without this machine's folders."""
    arguments = [prompts.name if a == str(prompts) else a for a in sys.argv[1:]]
    arguments = [
        a.split("=", 1)[0] + "=…" if a.startswith(("VLLM_VENV=", "MODEL_DIR=")) else a for a in arguments
    ]
    return shlex.join(["python", "benchmarks/serving/compare.py", *arguments])


if __name__ == "__main__":
    main()
