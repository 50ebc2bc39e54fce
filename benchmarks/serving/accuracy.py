"""GSM8K accuracy over the served API with speculation off and on, by lm-eval.

    python benchmarks/serving/accuracy.py --questions FILE.jsonl --lm-eval COMMAND [--limit 100]
        [--systems "dspark-ray off" "dspark-ray adaptive"] [--concurrency 16] [--max-tokens 256]

FILE has GSM8K's own lines, {"question": ..., "answer": ...}; the answer's last word is the number. COMMAND is
that of lm-eval (`pip install "lm_eval[api]"` in an environment of its own). Zero-shot, greedy; the last
number of a text counts (gsm8k.yaml). Writes benchmarks/results/NAME.json: each accuracy, and the texts and
verdicts that differ from the first system's.
"""

import argparse
import json
import os
import string
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from harness import FOLDER, PROJECT_DIR, write
from servers import Server, awake, load_systems, running

from dspark_ray.cli.bench import print_rows
from dspark_ray.core.errors import ConfigError
from dspark_ray.profiling.machine import machine_facts


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--lm-eval", default="lm_eval", help="its command")
    parser.add_argument("--file", type=Path, default=FOLDER / "systems.yaml")
    parser.add_argument("--systems", nargs="+", default=["dspark-ray off", "dspark-ray adaptive"])
    parser.add_argument("--limit", type=int, default=100, help="questions")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--name", default="gsm8k-accuracy", help="of the result file")
    options = parser.parse_args()

    base, systems = load_systems(options.file, options.systems, {})
    answers: dict[str, list[dict[str, Any]]] = {}
    with running(systems, PROJECT_DIR / base) as servers:
        for server in servers:
            with awake(server):
                answers[server.system.name] = evaluate(server, options)
    rows = [row_of(name, found, answers[options.systems[0]]) for name, found in answers.items()]
    print_rows(rows)
    settings = {key: getattr(options, key) for key in ("limit", "concurrency", "max_tokens")}
    write(options.name, {"machine": machine_facts(), "settings": settings, "systems": rows})


def evaluate(server: Server, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What lm-eval says of each question, in their order; `ConfigError` with its last words when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        task = string.Template((FOLDER / "gsm8k.yaml").read_text(encoding="utf-8")).substitute(
            QUESTIONS=options.questions.resolve(), MAX_TOKENS=options.max_tokens
        )
        (Path(folder) / "gsm8k_served.yaml").write_text(task, encoding="utf-8")
        url = f"{server.url}/v1/chat/completions"
        model = f"model={server.model},base_url={url},num_concurrent={options.concurrency}"
        command = [options.lm_eval, "run", "--model", "local-chat-completions", "--model_args"]
        command += [f"{model},tokenized_requests=False", "--tasks", "gsm8k_served", "--include_path", folder]
        command += ["--apply_chat_template", "--limit", str(options.limit)]
        command += ["--log_samples", "--output_path", folder]
        own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**own, "HF_HUB_OFFLINE": "1"}
        )
        samples = list(Path(folder).rglob("samples_gsm8k_served*.jsonl"))
        if done.returncode != 0 or not samples:
            raise ConfigError(f"lm-eval failed:\n{done.stdout[-800:]}\n{done.stderr[-2000:]}")
        found = [json.loads(line) for line in samples[0].read_text(encoding="utf-8").splitlines()]
    return sorted(found, key=lambda sample: int(sample["doc_id"]))


def row_of(name: str, found: list[dict[str, Any]], first: list[dict[str, Any]]) -> dict[str, Any]:
    """Its accuracy, and how far its answers are the first system's."""
    pairs = list(zip(found, first, strict=True))
    return {
        "system": name,
        "questions": len(found),
        "accuracy": sum(sample["exact_match"] for sample in found) / len(found),
        "texts_that_differ": sum(mine["resps"] != other["resps"] for mine, other in pairs),
        "verdicts_that_differ": sum(mine["exact_match"] != other["exact_match"] for mine, other in pairs),
    }


if __name__ == "__main__":
    main()
