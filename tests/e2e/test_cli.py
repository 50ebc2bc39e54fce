"""The offline commands on the real model, in process and small."""

import json
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from dspark_ray.cli.main import app
from dspark_ray.scheduling.step_table import StepTable

QUESTIONS = ["Count from one to twenty.", "Repeat after me: red green blue, red green blue, red green blue."]


def generate(folder: Path, mode: str) -> dict:
    """The figures and texts of one run; drafts are looked up in the prompt."""
    table = folder / "table.json"
    StepTable(rows=np.array([1, 512]), verify_ms=np.array([21.0, 532.0])).save(table)
    args = {
        "model": {"dtype": "float32", "max_model_len": 512},
        "engine": {"kv_num_blocks": 128},
        "speculation": {"drafter": {"kind": "ngram"}, "step_table": str(table)},
    }
    config, prompts, out = folder / "config.yaml", folder / "prompts.jsonl", folder / f"{mode}.json"
    config.write_text(json.dumps({"applications": [{"args": args}]}))
    prompts.write_text("".join(json.dumps({"turns": [question]}) + "\n" for question in QUESTIONS))
    options = ["--mode", mode, "--max-tokens", "32", "--concurrency", "2", "--json", str(out)]
    result = CliRunner().invoke(app, ["generate", "-c", str(config), "-p", str(prompts), *options])
    assert result.exit_code == 0, result.output
    return json.loads(out.read_text())


def test_generate_with_and_without_drafts(tmp_path: Path) -> None:
    plain, drafted = generate(tmp_path, "off"), generate(tmp_path, "fixed")
    assert [c["text"] for c in plain["completions"]] == [c["text"] for c in drafted["completions"]]
    assert plain["figures"]["drafted"] == 0
    assert drafted["figures"]["accepted"] > 0
    assert drafted["figures"]["τ"] > plain["figures"]["τ"] == 1
