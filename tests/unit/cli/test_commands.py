"""The commands on a tiny engine: what they print, what they write, and how they fail."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dspark_ray.cli import bench, calibrate, common, evaluate, generate
from dspark_ray.cli.common import MODES, LocalEngine, load_config
from dspark_ray.cli.main import USER_ERROR, app
from dspark_ray.core.clock import ManualClock
from dspark_ray.core.config import AppConfig
from dspark_ray.core.errors import ConfigError
from dspark_ray.core.types import VerificationMode
from dspark_ray.models.tokenizer import Tokenizer
from tests.drafter_families import family_dir
from tests.tiny import TOKENIZER_VOCAB_SIZE, tiny_tokenizer_dir
from tests.tiny_engine import tiny_drafter_dir, tiny_engine

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = (
    "fetch", "serve", "chat", "generate", "generate-data",
    "train", "evaluate", "calibrate", "profile", "bench", "simulate", "plan", "top", "new-key",
)  # fmt: skip


def invoke(*arguments: object) -> Result:
    # Wide enough that no word of a message is broken in two.
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter, a config that names it, a tokenizer and prompts."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "model").mkdir()
    tiny_tokenizer_dir(folder / "model")
    tiny_drafter_dir(folder / "drafter", TOKENIZER_VOCAB_SIZE, draft_vocab=None)
    write_config(folder / "config.yaml", speculation={"drafter": {"kind": "dspark", "path": "drafter"}})
    lines = [{"prompt": f"prompt {number}"} for number in range(6)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_config(path: Path, **args: Any) -> Path:
    document = {"applications": [{"import_path": "deployments.app:build_app", "args": args}]}
    path.write_text(json.dumps(document))  # JSON is YAML
    return path


@pytest.fixture
def local(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[AppConfig]:
    """Commands load a tiny engine instead of the configured model; what they asked for is kept here."""
    asked: list[AppConfig] = []
    monkeypatch.chdir(folder)

    def load(config: AppConfig, *, profiled: bool = True) -> LocalEngine:
        asked.append(config)
        speculation = {"mode": config.speculation.mode.value, "num_draft_tokens": 4}
        engine = tiny_engine(folder / "drafter", vocab_size=TOKENIZER_VOCAB_SIZE, speculation=speculation)
        return LocalEngine(config, engine, Tokenizer.load(folder / "model"))

    for module in (generate, evaluate, calibrate):
        monkeypatch.setattr(module, "load_engine", load)
    return asked


def test_help_lists_every_command() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert all(command in result.output for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert len(result.output) > 300


def test_help_needs_neither_torch_nor_ray() -> None:
    program = (
        "import sys\nfrom dspark_ray.cli.main import app\n"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules), 'heavy'"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def test_modes_are_the_modes() -> None:
    assert sorted(MODES) == sorted(mode.value for mode in VerificationMode)


def test_an_error_is_one_line(tmp_path: Path) -> None:
    path = write_config(tmp_path / "c.yaml", engine={"kv_blocks": 3})
    result = invoke("generate", "--config", path, "--prompts", path)
    assert result.exit_code == USER_ERROR
    assert "error:" in result.stderr
    assert "engine.kv_blocks" in result.stderr
    assert "Traceback" not in result.output


def test_a_config_that_is_not_there(tmp_path: Path) -> None:
    result = invoke("serve", tmp_path / "absent.yaml")
    assert result.exit_code == USER_ERROR
    assert "cannot read" in result.stderr


def test_overrides_are_checked_and_paths_absolute(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    config = load_config(folder / "config.yaml", mode="fixed", threshold=None)
    assert config.speculation.mode is VerificationMode.FIXED
    assert config.speculation.drafter.path == str((folder / "drafter").resolve())
    with pytest.raises(ConfigError, match=r"speculation\.mode"):
        load_config(folder / "config.yaml", mode="magic")


def test_a_path_counts_from_the_project_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "PROJECT_DIR", folder)
    config = load_config(folder / "config.yaml")
    assert config.speculation.drafter.path == str((folder / "drafter").resolve())


def test_generate_writes_everything(local: list[AppConfig], folder: Path, tmp_path: Path) -> None:
    result = invoke(
        "generate", "-c", "config.yaml", "-p", "prompts.jsonl", "--mode", "adaptive", "--limit", 3,
        "--max-tokens", 10, "--concurrency", 2, "--json", tmp_path / "out.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert local[0].speculation.mode is VerificationMode.ADAPTIVE
    content = json.loads((tmp_path / "out.json").read_text())
    ends = Tokenizer.load(folder / "model").eos_token_ids
    answers = [completion["token_ids"] for completion in content["completions"]]
    reasons = [completion["finish_reason"] for completion in content["completions"]]
    assert content["figures"]["output tokens"] == sum(map(len, answers))
    assert reasons == ["stop" if answer[-1] in ends else "length" for answer in answers]
    assert set(reasons) == {"stop", "length"}  # the template's end of turn ends an answer, as it does served
    assert all(
        len(answer) == 10 for answer, reason in zip(answers, reasons, strict=True) if reason == "length"
    )
    assert len(content["figures"]["acceptance by position"]) == 4
    assert [c["id"] for c in content["completions"]] == ["line-1", "line-2", "line-3"]
    assert "τ" in result.stdout


def test_generate_prints_texts_and_refusals(local: list[AppConfig]) -> None:
    result = invoke("generate", "-c", "config.yaml", "-p", "prompts.jsonl", "--limit", 2, "--max-tokens", 5)
    assert result.exit_code == 0
    assert "line-1 (length)" in result.stdout
    result = invoke("generate", "-c", "config.yaml", "-p", "prompts.jsonl", "--limit", 1, "--max-tokens", 500)
    assert "exceed" in result.stdout


def test_evaluate_verifies_everything(local: list[AppConfig], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    result = invoke(
        "evaluate", "-c", "config.yaml", "-p", "prompts.jsonl", "--max-tokens", 12, "--json", path
    )
    assert result.exit_code == 0, result.output
    assert local[0].speculation.mode is VerificationMode.FIXED
    (row,) = json.loads(path.read_text())["rows"]
    assert row["report"]["output_tokens"] == 72
    assert row["report"]["tau"] >= 1


def test_evaluate_puts_drafters_side_by_side(local: list[AppConfig], tmp_path: Path) -> None:
    path, png = tmp_path / "out.json", tmp_path / "out.png"
    family_dir(tmp_path / "feedback", "eagle3", TOKENIZER_VOCAB_SIZE)
    result = invoke(
        *("evaluate", "-c", "config.yaml", "-p", "prompts.jsonl", "--limit", 2, "--max-tokens", 8),
        *("-d", tmp_path / "feedback", "-d", "ngram", "--temperature", 0, "--temperature", 1),
        *("--json", path, "--png", png),
    )
    assert result.exit_code == 0, result.output
    assert [c.speculation.drafter.kind for c in local] == ["eagle3", "ngram"]
    assert local[0].speculation.num_draft_tokens == 4
    rows = json.loads(path.read_text())["rows"]
    assert [(r["drafter"], r["temperature"]) for r in rows] == [
        ("feedback", 0.0), ("feedback", 1.0), ("ngram", 0.0), ("ngram", 1.0)
    ]  # fmt: skip
    assert "acceptance by position" in result.stdout
    assert png.read_bytes().startswith(b"\x89PNG")


def test_evaluate_by_threshold(local: list[AppConfig], tmp_path: Path) -> None:
    path, png = tmp_path / "rows.json", tmp_path / "thresholds.png"
    thresholds = ("--threshold", 0, "--threshold", 0.5, "--threshold", 1)
    result = invoke(
        *("evaluate", "-c", "config.yaml", "-p", "prompts.jsonl", "--max-tokens", 12, *thresholds),
        *("--json", path, "--png", png),
    )
    assert result.exit_code == 0, result.output
    assert [config.speculation.mode for config in local] == ["threshold"] * 3
    assert [config.speculation.threshold for config in local] == [0.0, 0.5, 1.0]
    rows = json.loads(path.read_text())["rows"]
    assert [row["threshold"] for row in rows] == [0.0, 0.5, 1.0]
    assert rows[0]["report"]["verified_tokens_per_step"] > 1
    assert 0 <= rows[0]["report"]["accepted_share"] <= 1
    assert "of verified, stand" in result.stdout
    assert png.read_bytes().startswith(b"\x89PNG")


def test_evaluate_refuses_what_is_no_drafter(local: list[AppConfig]) -> None:
    result = invoke("evaluate", "-c", "config.yaml", "-p", "prompts.jsonl", "-d", "nowhere")
    assert result.exit_code == USER_ERROR
    assert "'nowhere' is no directory" in result.stderr


def test_calibrate_writes_all_rules(local: list[AppConfig], tmp_path: Path) -> None:
    from dspark_ray.calibration.temperatures import Temperatures
    from dspark_ray.models.drafters.confidence import drafter_digest

    path = tmp_path / "temperatures.json"
    result = invoke(
        *("calibrate", "-c", "config.yaml", "-p", "prompts.jsonl", "--max-tokens", 90, "--out", path),
        *("--json", tmp_path / "r.json", "--png", tmp_path / "r.png"),
    )
    assert result.exit_code == 0, result.output
    assert local[0].speculation.num_draft_tokens == 4
    found = Temperatures.load(path, expect={"drafter": drafter_digest(Path("drafter"))})
    assert set(found.by_rule) == {"greedy", "rejection", "shared_noise"}
    assert found.block_size == 4
    assert "ECE before" in result.stdout
    assert "moves ≤" in result.stdout
    rules = json.loads((tmp_path / "r.json").read_text())["rules"]
    assert [rule["rule"] for rule in rules] == ["greedy", "rejection", "shared_noise"]
    assert len(rules[0]["after"][0]["mean_outcome"]) == 15
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_calibrate_needs_a_drafter_with_confidences(tmp_path: Path) -> None:
    path = write_config(tmp_path / "c.yaml", speculation={"drafter": {"kind": "ngram"}})
    result = invoke("calibrate", "-c", path, "-p", path)
    assert result.exit_code == USER_ERROR
    assert "no DSpark drafter" in result.stderr
    result = invoke("calibrate", "-c", path, "-p", path, "-d", "nowhere")
    assert result.exit_code == USER_ERROR
    assert "'nowhere' is no directory" in result.stderr


def test_profile_refuses_what_it_cannot_measure(tmp_path: Path) -> None:
    off = write_config(tmp_path / "off.yaml", speculation={"mode": "off"})
    named = write_config(tmp_path / "named.yaml", speculation={"step_table": str(off)})
    assert "mode off" in invoke("profile", "-c", off).stderr
    assert "its own step table" in invoke("profile", "-c", named).stderr


@pytest.mark.parametrize("arguments", [(), ("--url", "http://x", "-c", "config.yaml")])
def test_bench_and_chat_want_one_of_two(local: list[AppConfig], arguments: tuple[str, ...]) -> None:
    assert invoke("chat", *arguments).exit_code == USER_ERROR
    assert invoke("bench", "-p", "prompts.jsonl", *arguments).exit_code == USER_ERROR


def test_bench_drives_a_server(
    local: list[AppConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from dspark_ray.profiling import load

    timings = [load.ClientTiming(5, 10.0, 50.0), load.ClientTiming(0, 1.0, 1.0, "503: full")]
    monkeypatch.setattr(load, "find_model", lambda url: "m")
    monkeypatch.setattr(
        load, "drive", lambda *a, concurrency, **k: load.LoadReport(concurrency, 1.0, timings)
    )
    path = tmp_path / "out.json"
    result = invoke(
        "bench", "-p", "prompts.jsonl", "--url", "http://x/v1/", "--concurrency", 4, "--json", path
    )
    assert result.exit_code == 0, result.output
    assert "503: full" in result.stderr
    content = json.loads(path.read_text())
    assert content["url"] == "http://x"
    assert content["levels"][0]["errors"] == 1
    assert bench.bench.__doc__


def test_a_result_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        common.write_json(tmp_path / "file" / "out.json", {})


def test_a_new_key_opens_what_its_line_describes() -> None:
    from dspark_ray.serving.api_keys import KeyRing, parse_keys

    result = invoke("new-key", "--name", "alice", "--tier", "flex", "--requests-per-minute", 5)
    assert result.exit_code == 0
    (line,) = result.stdout.splitlines()
    key = result.stderr.splitlines()[-1]
    assert key not in result.stdout
    ring = KeyRing(lambda: parse_keys([line], "test"), None, ManualClock())
    found = ring.find(key)
    assert found is not None
    assert (found.name, found.tier.value, found.requests_per_minute) == ("alice", "flex", 5.0)
    failed = invoke("new-key", "--name", "a b")
    assert failed.exit_code == USER_ERROR
    assert "--name" in failed.stderr
