"""What comparisons over HTTP share: options, one measured run of a server, ratios between servers."""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
from servers import Server, awake, load_systems, running, version_of

from dspark_ray.cli.common import load_config
from dspark_ray.cli.top import parse
from dspark_ray.engine.measure import distinct_ngrams
from dspark_ray.models.fetch import resolve_model
from dspark_ray.models.prompts import RawPrompt, read_raw_prompts
from dspark_ray.models.tokenizer import Tokenizer
from dspark_ray.profiling.load import ClientTiming, LoadReport, Slo, drive
from dspark_ray.profiling.machine import machine_facts
from dspark_ray.profiling.ratio import Run, pairwise
from dspark_ray.profiling.speculation import speculation_figures

FOLDER = Path(__file__).resolve().parent
PROJECT_DIR = FOLDER.parents[1]
RESULTS = FOLDER.parent / "results"
DEFAULT_MODEL = PROJECT_DIR / "configs" / "smollm2-135m-cpu.yaml"
WARM_UP_PROMPTS = 8
PRIVATE = ("VLLM_VENV", "LLAMA_SERVER", "GGUF", "EAGLE3_DIR", "MTP_DIR", "MODEL_DIR", "TRANSFORMERS_VENV")

Row = dict[str, Any]
Drive = Callable[[Server], LoadReport]  # sends a whole load to a server


def add_options(parser: argparse.ArgumentParser, name: str) -> None:
    """Of every comparison. name: of its result files"""
    parser.add_argument(
        "--prompts", type=Path, nargs="+", required=True, help="JSON lines; several files are mixed in turn"
    )
    parser.add_argument("--file", type=Path, default=FOLDER / "systems.yaml")
    parser.add_argument(
        "--systems", nargs="+", help="names in the file; default: all whose variables are set"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--slo", default="500:50", metavar="TTFT:TPOT", help="in ms, for goodput")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="variables of systems.yaml"
    )
    parser.add_argument("--name", default=name, help="of the result files")


@dataclass(frozen=True)
class Bench:
    """The servers of a comparison, and what is asked of them."""

    options: argparse.Namespace
    servers: list[Server]
    prompts: list[RawPrompt]
    tokenizer: Tokenizer

    @cached_property
    def slo(self) -> Slo:
        """As the option has it."""
        ttft_ms, tpot_ms = map(float, self.options.slo.split(":"))
        return Slo(ttft_ms, tpot_ms)

    def round(self, number: int, drive_one: Drive, concurrency: int | None = None) -> list[tuple[Row, Run]]:
        """One run of every server that can take the load, beginning with another one each time."""
        able = [
            s for s in self.servers if concurrency is None or concurrency <= (s.system.most_requests or 10**9)
        ]
        first = number % len(able)
        results = []
        for server in able[first:] + able[:first]:
            others = [other for other in self.servers if other is not server]
            paused_s = sum(_total(other) for other in others)
            with awake(server):
                row, run = self._measure(server, drive_one)
            row["paused_cpu_s"] = round(sum(_total(other) for other in others) - paused_s, 2)
            row = {"system": server.system.name, "round": number, **row}
            print(f"round {number + 1}: {row['system']} {row['tokens_per_s']:.1f} tokens/s", flush=True)
            results.append((row, run))
        return results

    def _measure(self, server: Server, drive_one: Drive) -> tuple[Row, Run]:
        """The clients' figures, the server's CPU seconds, what it says of its speculation, and the texts'."""
        before_s, before = server.cpu_seconds(), _metrics(server)
        report = drive_one(server)
        after = _metrics(server)
        if server.system.count_texts:
            report = replace(report, timings=[self._counted(timing) for timing in report.timings])
        used = {name: seconds - before_s.get(name, 0.0) for name, seconds in server.cpu_seconds().items()}
        row: Row = {**report.figures(), **report.goodput(self.slo), "finish_reasons": report.finish_reasons()}
        row |= self._texts(report) | speculation_figures(before, after)
        row["cpu_s"] = {name: round(seconds, 2) for name, seconds in used.items() if seconds >= 0.05}
        row["failures"] = sorted({timing.error for timing in report.timings if timing.error})[:3]
        tokens = np.array([float(timing.num_tokens) for timing in report.timings])
        busy_s = np.array([timing.total_ms / 1e3 for timing in report.timings])
        return row, Run(row["tokens_per_s"], tokens, busy_s)

    def _counted(self, timing: ClientTiming) -> ClientTiming:
        """With the tokens of its text instead of those that its server told."""
        return replace(timing, num_tokens=len(self.tokenizer.encode(timing.text)))

    def _texts(self, report: LoadReport) -> Row:
        """Whether the server counts as we do, was asked the same, and repeats itself.

        `recounted` is the tokens of its texts, with one for the end of each that ended by itself, to what it
        says; near 1, since a text need not be cut into tokens as it was made.
        """
        good = [timing for timing in report.timings if not timing.error]
        texts = [self.tokenizer.encode(timing.text) for timing in good]
        ends = sum(timing.finish_reason == "stop" for timing in good)
        told = sum(timing.num_tokens for timing in good)
        return {
            "prompt_tokens": sum(timing.num_prompt_tokens for timing in good),
            "recounted": (sum(map(len, texts)) + ends) / max(told, 1),
            "distinct_4grams": distinct_ngrams(texts),
        }


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[Bench]:
    """Everything started, warm and paused."""
    model_dir = resolve_model(load_config(DEFAULT_MODEL).model.source)
    variables = {"MODEL_DIR": str(model_dir), **dict(item.split("=", 1) for item in options.set)}
    base, systems = load_systems(options.file, options.systems, variables)
    prompts = mixed([read_raw_prompts(path) for path in options.prompts])
    with running(systems, PROJECT_DIR / base) as servers:
        bench = Bench(options, servers, prompts, Tokenizer.load(model_dir))
        for server in servers:
            count = min(WARM_UP_PROMPTS, server.system.most_requests or WARM_UP_PROMPTS)
            with awake(server):
                closed_loop(server, prompts[-count:], count, options.max_tokens)
        yield bench


def closed_loop(
    server: Server, prompts: Sequence[RawPrompt], concurrency: int, max_tokens: int
) -> LoadReport:
    """So many requests in flight until all prompts are answered."""
    return drive(
        server.url,
        server.model,
        prompts,
        concurrency=concurrency,
        max_tokens=max_tokens,
        fields=server.system.body,
    )


def mixed(files: Sequence[Sequence[RawPrompt]]) -> list[RawPrompt]:
    """One prompt of each file in turn."""
    return [prompt for turn in zip_longest(*files) for prompt in turn if prompt is not None]


def repeated(prompts: Sequence[RawPrompt], count: int) -> list[RawPrompt]:
    """The first `count`, from the start again where there are fewer."""
    return [prompts[n % len(prompts)] for n in range(count)]


def ratios(load: str, rounds: Sequence[Sequence[tuple[Row, Run]]]) -> list[Row]:
    """Each system to each other one, at one load."""
    runs: dict[str, list[Run]] = {}
    for results in rounds:
        for row, run in results:
            runs.setdefault(row["system"], []).append(run)
    return [{"load": load, **row} for row in pairwise(runs)]


def medians(rows: Sequence[Row], ratio_rows: Sequence[Row]) -> list[Row]:
    """Over rounds, of every figure that is a number; with the ratio to the first system, and its interval."""
    keys = dict.fromkeys((row["load"], row["system"]) for row in rows)
    reference = rows[0]["system"]
    result = []
    for load, name in keys:
        group = [row for row in rows if (row["load"], row["system"]) == (load, name)]
        figures = {key: _median([row.get(key) for row in group]) for key in group[0] if key != "round"}
        found = [r for r in ratio_rows if (r["load"], r["system"], r["to"]) == (load, name, reference)]
        interval = {"ratio": [found[0][key] for key in ("median", "low", "high")]} if found else {}
        shown = {key: value for key, value in figures.items() if value is not None}
        result.append({"load": load, "system": name, "rounds": len(group), **interval, **shown})
    return result


def result_of(bench: Bench, script: str, rows: list[Row], ratio_rows: list[Row]) -> Row:
    """The content of a result file, without this machine's folders."""
    systems = []
    for server in bench.servers:
        system = server.system
        described = system.model_dump(
            mode="json", exclude_defaults=True, exclude={"port", "version", "model"}
        )
        systems.append({**described, "version": version_of(system), "memory_mb": server.memory_mb()})
    result = {
        "command": _command(script, bench.options),
        "machine": machine_facts(),
        "slo_ms": {"ttft": bench.slo.ttft_ms, "tpot": bench.slo.tpot_ms},
        "systems": systems,
        "medians": medians(rows, ratio_rows),
        "ratios": ratio_rows,
        "rounds": rows,
    }
    return dict(json.loads(_without_folders(json.dumps(result), bench.options)))


def write(name: str, result: Row) -> Path:
    """The result file; its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written to {path.relative_to(PROJECT_DIR)}")
    return path


def _metrics(server: Server) -> dict[tuple[str, str], float]:
    """Its metrics page; empty where it has none."""
    try:
        page = httpx.get(f"{server.url}/metrics", timeout=30.0)
        return parse(page.text) if page.status_code == 200 else {}
    except (httpx.HTTPError, ValueError):
        return {}


def _total(server: Server) -> float:
    return sum(server.cpu_seconds().values())


def _median(values: Sequence[Any]) -> float | None:
    numbers = [value for value in values if isinstance(value, int | float)]
    return round(median(numbers), 4) if len(numbers) == len(values) and numbers else None


def _command(script: str, options: argparse.Namespace) -> str:
    """What was typed, prompt files by their names alone."""
    names = {str(path): path.name for path in options.prompts}
    return shlex.join(["python", f"benchmarks/serving/{script}", *(names.get(a, a) for a in sys.argv[1:])])


def _without_folders(text: str, options: argparse.Namespace) -> str:
    """`text` with the values of variables that are this machine's folders as their names."""
    values = dict(item.split("=", 1) for item in options.set)
    for name in PRIVATE:
        if name in values:
            text = text.replace(f"{name}={values[name]}", f"{name}=…").replace(values[name], f"${name}")
    text = text.replace(str(resolve_model(load_config(DEFAULT_MODEL).model.source)), "$MODEL_DIR")
    return text.replace(sys.prefix, "$TRANSFORMERS_VENV").replace(str(Path.home()), "~")
