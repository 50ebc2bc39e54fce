"""`dspark-ray check`: what it prints, and its exit status; other commands refuse vLLM's configurations."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dspark_ray.cli.main import app

ROOT = Path(__file__).resolve().parents[3]
QWEN = ROOT / "configs" / "qwen3-8b-dspark-vllm.yaml"


def run(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


def test_a_sound_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = run("check", str(QWEN))
    assert result.exit_code == 0, result.output
    assert "KV of the longest request" in result.output
    assert "ok" in result.stdout.splitlines()[-1]


def test_smaller_hardware_by_options() -> None:
    result = run("check", str(QWEN), "--device-memory-gib", "16", "--devices-per-node", "1")
    assert result.exit_code == 2
    assert "hardware.device_memory_gib: weights, drafter and workspace take" in result.stderr
    assert "→ raise vllm.tensor_parallel_size" in result.stderr


def test_nothing_starts_that_cannot_work(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text(QWEN.read_text().replace("num_draft_tokens: 7", "num_draft_tokens: 9"))
    result = run("serve", str(broken))
    assert result.exit_code == 2
    assert "a drafter whose block has 7" in " ".join(result.stderr.split())


def test_commands_of_the_native_engine_say_so(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    result = run("generate", "--config", str(QWEN), "--prompts", str(prompts))
    assert result.exit_code == 2
    assert "this command runs the native engine" in " ".join(result.stderr.split())
