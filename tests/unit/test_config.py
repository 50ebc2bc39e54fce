"""Every configuration in the repository loads; every mistake is named."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from dspark_ray.core.config import AppConfig, load_app_config, parse_app_config, with_absolute_paths
from dspark_ray.core.errors import ConfigError
from dspark_ray.core.types import VerificationMode

ROOT = Path(__file__).resolve().parents[2]
SERVED_CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", SERVED_CONFIGS, ids=lambda path: path.name)
def test_every_served_configuration_loads(path: Path) -> None:
    config = load_app_config(path)
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert document["applications"][0]["import_path"] == "deployments.app:build_app"
    assert config == parse_app_config(config.model_dump(mode="json"))


def test_there_is_a_default_to_serve() -> None:
    assert ROOT / "configs" / "smollm2-135m-cpu.yaml" in SERVED_CONFIGS


def test_defaults_need_no_keys() -> None:
    config = parse_app_config({})
    assert config.model.source == "default"
    assert config.speculation.mode is VerificationMode.ADAPTIVE
    assert config.speculation.drafter.kind == "none"


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"modle": {}}, "modle"),
        ({"engine": {"kv_blocks": 3}}, "engine.kv_blocks"),
        ({"engine": {"max_running": 0}}, "engine.max_running"),
        ({"engine": {"max_running": 9, "max_step_rows": 8}}, "max_running must not exceed max_step_rows"),
        ({"model": {"dtype": "float64"}}, "model.dtype"),
        ({"model": "default"}, "model"),
        ({"speculation": {"mode": "sometimes"}}, "speculation.mode"),
        ({"speculation": {"num_draft_tokens": 33}}, "speculation.num_draft_tokens"),
        ({"speculation": {"num_draft_tokens": 3, "fixed_tokens": 4}}, "fixed_tokens must not exceed"),
        ({"speculation": {"threshold": 1.5}}, "speculation.threshold"),
        ({"speculation": {"drafter": {"kind": "dspark"}}}, "drafter.path is required"),
        ({"speculation": {"drafter": {"kind": "ngram", "ngram_min": 5}}}, "ngram_min must not exceed"),
        ({"scheduler": {"policy": "shared_cap"}}, "cap_draft_tokens_per_s is required"),
        ({"scheduler": {"cap_draft_tokens_per_s": 0}}, "scheduler.cap_draft_tokens_per_s"),
        ({"scheduler": {"cap_draft_tokens_per_s": 9}}, "means nothing under policy 'local'"),
        ({"scheduler": {"tiers": {"gold": {}}}}, "scheduler.tiers.gold"),
        ({"scheduler": {"tiers": {"flex": {"weight": 0}}}}, "scheduler.tiers.flex.weight"),
        ({"scheduler": {"report_interval_ms": 1500.0}}, r"plan_ttl_ms \(2000\) must be at least twice"),
        ({"serving": {"num_replicas": "two"}}, "serving.num_replicas"),
        ({"engine": {"kv_num_blocks": 100}}, "args: .* 1600 tokens .* 2048: set kv_num_blocks .* 128, or"),
        ({"lora": {"adapters": [{"name": "a", "path": "x"}] * 2}}, "two adapters have the same name"),
        ({"lora": {"adapters": [{"name": "smollm2-135m-instruct", "path": "x"}]}}, "the model's own name"),
        (
            {"engine": {"kind": "timed", "timed": {"step_tables": ["t"]}}, "lora": {"load_from": "x"}},
            "no weights to",
        ),
        ({"engine": {"kind": "vllm", "deterministic": True}}, "engine.deterministic: only the native"),
        ({"engine": {"kind": "vllm"}, "speculation": {"hot_swap": {"load_from": "x"}}}, "only the native"),
        ({"engine": {"kind": "vllm"}, "observability": {"record_path": "r"}}, "record_path: only the native"),
    ],
)
def test_a_mistake_is_named(args: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_app_config(args)


def test_all_mistakes_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_app_config({"modle": {}, "engine": {"max_running": 0}})
    assert str(caught.value).count("\n") == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("applications: [", "is not valid YAML"),
        ("", "no 'applications' list"),
        ("applications: []", "no 'applications' list"),
        ("applications: [text]", "no 'applications' list"),
        ("[1, 2]", "no 'applications' list"),
        ("applications: [{args: {engine: {max_running: -1}}}]", "engine.max_running"),
        ("applications: [{args: [1]}]", "not valid"),
    ],
)
def test_files_that_cannot_work(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_app_config(path)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_app_config(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        load_app_config(tmp_path / "binary.yaml")


def test_no_args_are_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for text in ("applications: [{name: x}]", "applications: [{args: }]"):
        path.write_text(text, encoding="utf-8")
        assert load_app_config(path) == AppConfig()


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse_app_config({}).engine.max_running = 3  # type: ignore[misc]


def dspark(**sections: dict[str, Any]) -> AppConfig:
    speculation = {"drafter": {"kind": "dspark", "path": "drafter"}, **sections.pop("speculation", {})}
    return parse_app_config({"speculation": speculation, **sections})


def test_files_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("first/drafter", "second/drafter", "second/model"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "table.json").write_text("{}")
    config = dspark(model={"source": "model"}, speculation={"step_table": "~/table.json"})
    found = with_absolute_paths(config, (tmp_path / "first", tmp_path / "second"))
    assert found.speculation.drafter.path == str(tmp_path / "first" / "drafter")
    assert found.speculation.step_table == str(tmp_path / "table.json")
    assert found.model.source == str(tmp_path / "second" / "model")


def test_records_go_where_the_shell_is(tmp_path: Path) -> None:
    config = parse_app_config({"observability": {"record_path": "runs/r"}})
    found = with_absolute_paths(config, (tmp_path, tmp_path / "second"))
    assert found.observability.record_path == str(tmp_path / "runs" / "r")


def test_the_default_source_never_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "default").mkdir()
    assert with_absolute_paths(AppConfig(), [tmp_path]).model.source == "default"
    assert (
        with_absolute_paths(parse_app_config({"model": {"source": "a/b"}}), [tmp_path]).model.source == "a/b"
    )


@pytest.mark.parametrize("key", ["drafter.path", "temperatures", "step_table"])
def test_a_missing_file_is_named_with_its_key(tmp_path: Path, key: str) -> None:
    if key == "drafter.path":
        config = dspark()
    else:
        (tmp_path / "drafter").mkdir()
        config = dspark(speculation={key: "nothing.json"})
    with pytest.raises(ConfigError, match=rf"^speculation\.{key}: .*does not exist"):
        with_absolute_paths(config, [tmp_path])
