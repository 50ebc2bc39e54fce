"""Our load generator against vLLM's own: both drive one server with the same prompts, in turn.

    python benchmarks/serving/agreement.py --prompts FILE.jsonl --set VLLM_VENV=DIR [--concurrency 8]
        [--limit 64] [--rounds 3] [--systems "dspark-ray off"]

`vllm bench serve` of VLLM_VENV gets the first turns as its custom data set. Writes
benchmarks/results/NAME.json: throughput, mean TTFT and mean TPOT by both clients, medians over rounds, and
how far ours are from theirs.
"""

import argparse
import json
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

from harness import DEFAULT_MODEL, Row, add_options, closed_loop, opened, repeated, result_of, write
from servers import Server, awake

from dspark_ray.cli.bench import print_rows
from dspark_ray.cli.common import load_config
from dspark_ray.core.errors import ConfigError
from dspark_ray.models.fetch import resolve_model
from dspark_ray.models.prompts import RawPrompt

THEIRS = {  # by our names
    "tokens_per_s": "output_throughput",
    "ttft_mean_ms": "mean_ttft_ms",
    "tpot_mean_ms": "mean_tpot_ms",
    "output_tokens": "total_output_tokens",
}
# The `vllm` command asks for a package of that name, which the CPU build has not.
_BENCH = "from argparse import ArgumentParser as P; from vllm.benchmarks import serve as s"
_BENCH += "; p = P(); s.add_cli_args(p); s.main(p.parse_args())"


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, "client-agreement")
    parser.set_defaults(systems=["dspark-ray off"])
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--limit", type=int, default=64, help="prompts")
    options = parser.parse_args()
    variables = dict(item.split("=", 1) for item in options.set)
    if "VLLM_VENV" not in variables or len(options.systems) != 1:
        parser.error("give VLLM_VENV and one system")

    rows: list[Row] = []
    with opened(options) as bench:
        prompts = repeated(bench.prompts, options.limit)
        drive_one = partial(
            closed_loop, prompts=prompts, concurrency=options.concurrency, max_tokens=options.max_tokens
        )
        for number in range(options.rounds):
            [(row, _)] = bench.round(number, drive_one)
            [server] = bench.servers
            with awake(server):
                theirs = vllm_bench(server, prompts, options, Path(variables["VLLM_VENV"]))
            rows.append({"load": f"{options.concurrency}:{options.limit}", **row, "theirs": theirs})
        result = result_of(bench, "agreement.py", rows, [])
    table = []
    for name in THEIRS:
        ours, other = median(row[name] for row in rows), median(row["theirs"][name] for row in rows)
        table.append({"figure": name, "ours": ours, "vllm bench serve": other, "ours / theirs": ours / other})
    print_rows(table)
    write(options.name, {**result, "agreement": table})


def vllm_bench(server: Server, prompts: list[RawPrompt], options: argparse.Namespace, venv: Path) -> Row:
    """One run of theirs; `ConfigError` with its last words when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        data, result = Path(folder) / "prompts.jsonl", Path(folder) / "result.json"
        texts = [(prompt.messages or ({"content": prompt.text},))[-1]["content"] for prompt in prompts]
        data.write_text("\n".join(json.dumps({"prompt": text}) for text in texts), encoding="utf-8")
        command = [str(venv / "bin" / "python"), "-c", _BENCH, "--backend", "openai-chat"]
        command += ["--base-url", server.url, "--endpoint", "/v1/chat/completions", "--model", server.model]
        model_dir = resolve_model(
            load_config(DEFAULT_MODEL).model.source
        )  # without a tokenizer it tells no times
        command += ["--tokenizer", str(model_dir), "--skip-chat-template", "--dataset-name", "custom"]
        command += ["--dataset-path", str(data), "--disable-shuffle", "--num-prompts", str(len(prompts))]
        command += ["--custom-output-len", str(options.max_tokens), "--temperature", "0"]
        command += ["--max-concurrency", str(options.concurrency), "--disable-tqdm"]
        command += ["--percentile-metrics", "ttft,tpot"]
        command += ["--save-result", "--result-dir", folder, "--result-filename", result.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not result.is_file():
            raise ConfigError(f"vllm bench serve failed:\n{done.stdout[-800:]}\n{done.stderr[-1500:]}")
        told = json.loads(result.read_text(encoding="utf-8"))
        return {ours: told[theirs] for ours, theirs in THEIRS.items()}


if __name__ == "__main__":
    main()
