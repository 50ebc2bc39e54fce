"""`dspark-ray check`: it accepts what ships, and names what is wrong, why and what to do."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dspark_ray.core.config import load_app_config, parse_app_config, with_absolute_paths
from dspark_ray.core.errors import ConfigError
from dspark_ray.preflight.check import check_config, require_sound
from dspark_ray.preflight.sources import SHIPPED
from tests.tiny_lora import write_adapter

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))

QWEN: dict[str, Any] = {
    "model": {"id": "qwen3-8b", "source": "Qwen/Qwen3-8B", "max_model_len": 16384},
    "engine": {"kind": "vllm", "max_running": 128, "max_step_rows": 8192},
    "speculation": {
        "drafter": {"kind": "dspark", "hub_id": "deepseek-ai/dspark_qwen3_8b_block7"},
        "num_draft_tokens": 7,
        "mode": "adaptive",
    },
    "vllm": {"gpu_memory_utilization": 0.9},
    "hardware": {"device_memory_gib": 40, "devices_per_node": 8},
}
FLASH: dict[str, Any] = {
    "model": {"source": "deepseek-ai/DeepSeek-V4-Flash-DSpark", "max_model_len": 65536},
    "engine": {"kind": "vllm", "kv_block_size": 256, "max_step_rows": 8192},
    "speculation": {"drafter": {"kind": "dspark"}, "num_draft_tokens": 5},
    "vllm": {"tensor_parallel_size": 4, "gpu_memory_utilization": 0.9},
    "hardware": {"device_memory_gib": 80, "devices_per_node": 8},
}


def changed(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with values set by dotted keys; None removes a key."""
    args = copy.deepcopy(base)
    for path, value in changes.items():
        *sections, key = path.split(".")
        section = args
        for name in sections:
            section = section.setdefault(name, {})
        if value is None:
            section.pop(key, None)
        else:
            section[key] = value
    return args


def problems(args: dict[str, Any]) -> list[str]:
    return [str(problem) for problem in check_config(parse_app_config(args)).problems]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_configuration_is_sound(path: Path) -> None:
    config = with_absolute_paths(load_app_config(path), [ROOT])
    report = check_config(config)
    assert report.problems == ()
    if config.engine.kind != "timed":  # which loads no model
        assert report.memory is not None, "its shapes must ship, or nothing was checked"


def test_adapters_are_looked_at_before_anything_starts(tmp_path: Path) -> None:
    path = str(write_adapter(tmp_path, "all", use_dora=True).path)
    (problem,) = problems({"lora": {"adapters": [{"name": "sql", "path": path}]}})
    assert "lora.adapters.sql" in problem
    assert "use_dora = True is not supported" in problem


def test_what_the_catalogue_starts_from_is_sound() -> None:
    assert problems(QWEN) == problems(FLASH) == problems(OURS) == problems(changed(OURS, {RANKS: 2})) == []
    assert problems(changed(QWEN, {"scheduler": CAP})) == []  # vLLM's own budgets keep to it


OURS = changed(
    QWEN, {"engine.kind": "native", "engine.kv_num_blocks": 1024, "engine.max_running": 16, "vllm": None}
)
RANKS = "engine.tensor_parallel_size"
EIGHT = "vllm.tensor_parallel_size"
CAP = {"policy": "shared_cap", "cap_draft_tokens_per_s": 100}
CATALOGUE: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "drafter of another model": (
        QWEN,
        {"speculation.drafter.hub_id": "deepseek-ai/dspark_qwen3_4b_block7"},
        "reads states of size 2560, the target's are 4096",
        "trained for this target",
    ),
    "taps of another model": (
        QWEN,
        {"speculation.drafter.hub_id": "deepseek-ai/dspark_qwen3_14b_block7"},
        "tap layers .* are not layers of a target with 36",
        "target_layer_ids",
    ),
    "drafter of another depth": (
        QWEN,
        {"speculation.drafter.hub_id": "deepseek-ai/dspark_qwen3_14b_block7"},
        "trained for 40 layers, the target has 36",
        "trained for this target",
    ),
    "k above the block": (
        QWEN,
        {"speculation.num_draft_tokens": 8},
        "8 tokens from a drafter whose block has 7",
        "at most 7",
    ),
    "k above the bundled block": (
        FLASH,
        {"speculation.num_draft_tokens": 7},
        "7 tokens from a drafter whose block has 5",
        "at most 5",
    ),
    "k times requests above a step": (
        QWEN,
        {"engine.max_step_rows": 1000},
        "128 requests with 7 drafted tokens each are 1024 rows",
        "at least 1024, or max_running to at most 125",
    ),
    "adaptive and eager": (
        QWEN,
        {"vllm.engine_args.enforce_eager": True},
        "eager mode has none",
        "remove it, or set speculation.mode to fixed",
    ),
    "adaptive and LoRA": (
        QWEN,
        {"lora": {"load_from": "adapters"}},
        "maps adapters",
        "serve without adapters",
    ),
    "adaptive and pipeline stages": (
        QWEN,
        {"vllm.pipeline_parallel_size": 2},
        "last pipeline stage",
        "raise tensor_parallel_size",
    ),
    "adaptive and local argmax": (
        QWEN,
        {"vllm.speculative_args.use_local_argmax_reduction": True},
        "never gathers",
        "remove it",
    ),
    "adaptive and a backend": (
        QWEN,
        {"vllm.engine_args.attention_backend": "FLASHINFER"},
        "lengths are decided on the device",
        "FLASH_ATTN",
    ),
    "adaptive and piecewise graphs": (
        QWEN,
        {"vllm.engine_args.compilation_config": {"cudagraph_mode": "piecewise"}},
        "needs full CUDA graphs, and this is PIECEWISE",
        "FULL_AND_PIECEWISE",
    ),
    "adaptive without confidences": (
        QWEN,
        {"speculation.drafter": {"kind": "eagle3", "hub_id": "RedHatAI/Qwen3-8B-speculator.eagle3"}},
        "vLLM verifies adaptively with dspark only",
        "fixed or off",
    ),
    "a mode that vLLM has not": (
        QWEN,
        {"speculation.mode": "threshold"},
        "vLLM has no mode threshold",
        "engine.kind to native",
    ),
    "DSpark on a CPU": (QWEN, {"vllm.device": "cpu"}, "through Triton", "engine.kind to native"),
    "heads that do not divide": (
        QWEN,
        {EIGHT: 6},
        "6 ranks do not divide 32 attention heads",
        "use one of 1, 2, 4, 8, 16, 32",
    ),
    "groups that do not divide": (
        FLASH,
        {EIGHT: 16},
        "16 ranks do not divide 8 output groups",
        "1, 2, 4, 8",
    ),
    "experts of a dense model": (QWEN, {"vllm.expert_parallel": True}, "has no experts", "set it to false"),
    "more ranks than a node has": (
        changed(QWEN, {EIGHT: 8}),
        {"hardware.devices_per_node": 4},
        "mp keeps all 8 ranks on one node",
        "set it to ray",
    ),
    "weights that do not fit": (
        QWEN,
        {"hardware.device_memory_gib": 16},
        "weights, drafter and workspace take 22.8 GiB",
        "raise vllm.tensor_parallel_size",
    ),
    "KV that does not fit": (
        QWEN,
        {"hardware.device_memory_gib": 27},
        "the KV of one request of 16384 tokens is 2.56 GiB .* 1.47 GiB are free",
        "at most 9389",
    ),
    "blocks that do not fit": (
        QWEN,
        {
            "vllm.gpu_memory_utilization": None,
            "engine.kv_num_blocks": 8192,
        },
        "8192 blocks take 20.50 GiB .* 17.17 GiB are free",
        "at most 6860",
    ),
    "longer than the model": (QWEN, {"model.max_model_len": 50000}, "made for 40960", "at most 40960"),
    "a target that the native engine has not": (
        FLASH,
        {"engine.kind": "native", "speculation.drafter": {"kind": "none"}, "engine.kv_num_blocks": 256},
        "does not run model_type 'deepseek_v4'",
        "engine.kind to vllm",
    ),
    "ranks that do not divide the heads": (
        OURS,
        {RANKS: 3},
        "3 ranks do not divide 32 attention heads, 8 KV heads and an inner width of 12288",
        "use one of 1, 2, 4, 8, 16, 32",
    ),
    "ranks on too few GPUs": (
        OURS,
        {RANKS: 4, "model.device": "cuda", "hardware.devices_per_node": 2},
        "STRICT_PACK keeps all 4 ranks on one node, and a node has 2 devices",
        "set it to PACK",
    ),
    "more than two ranks and one text": (
        OURS,
        {RANKS: 4, "engine.deterministic": True},
        "engine.deterministic: 4 ranks add up in an order that depends on the batch",
        "to 1 or 2",
    ),
    "our ranks on one small node": (
        OURS,
        {RANKS: 4, "hardware.devices_per_node": 2},
        "STRICT_PACK keeps all 4 ranks on one node, and a node has 2 devices",
        "set it to PACK",
    ),
    "weights that do not fit our ranks": (
        OURS,
        {RANKS: 2, "hardware.device_memory_gib": 8},
        "weights, drafter and workspace take",
        "raise engine.tensor_parallel_size",
    ),
    "a cap without a budget": (
        QWEN,
        {"scheduler": CAP, "speculation.mode": "fixed"},
        "shared_cap limits budgets, and vLLM chooses none",
        "speculation.mode to adaptive",
    ),
    "weights that vLLM does not rank by": (
        QWEN,
        {"scheduler": {"policy": "weighted"}},
        "by survival alone",
        "engine.kind to native",
    ),
    "a share for several cores": (
        QWEN,
        {"scheduler": CAP, "vllm.data_parallel_size": 2},
        "each of 2 cores would take the replica's whole share",
        "raise serving.num_replicas",
    ),
    "weights that vLLM does not quantise so": (
        QWEN,
        {"model.quantization": "int8"},
        "made by the native engine",
        "quantised checkpoint",
    ),
    "ranks of adapters": (
        QWEN,
        {"lora": {"load_from": "adapters", "max_rank": 600}, "speculation.mode": "fixed"},
        "600, and vLLM serves ranks up to 512",
        "at most 512",
    ),
    "a table for vLLM": (QWEN, {"speculation.step_table": "t.json"}, "profiles by itself", "remove it"),
}


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_broken_configuration_is_named_with_its_cure(name: str) -> None:
    base, changes, reason, cure = CATALOGUE[name]
    found = problems(changed(base, changes))
    assert any(re.search(reason, problem) and re.search(cure, problem) for problem in found), found


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (QWEN, {"speculation.drafter": {"kind": "spark", "hub_id": "a/b"}}, "drafter.kind.*'dspark'"),
        (QWEN, {"speculation.drafter": {"kind": "dflash"}}, "drafter.path is required for kind 'dflash'"),
        (QWEN, {"speculation.drafter.path": "x"}, "name two checkpoints"),
        (QWEN, {"engine.kind": "native", "speculation.drafter.kind": "medusa"}, "no drafter 'medusa'"),
        (FLASH, {"engine": {"kind": "native", "kv_num_blocks": 4096}}, "only vLLM reads a drafter"),
        (QWEN, {"vllm.engine_args.max_num_seqs": 3}, "is set by engine.max_running: use that key"),
        (QWEN, {"vllm.engine_args.enable_lora": True}, "is set by lora.adapters or lora.load_from"),
        (QWEN, {"vllm.speculative_args.method": "mtp"}, "is set by speculation.drafter.kind"),
        (QWEN, {"vllm.executor": "ray", "vllm.data_parallel_size": 2}, "placement groups of its own"),
        (QWEN, {"engine.kind": "sglang"}, "engine.kind"),
        (QWEN, {"engine.tensor_parallel_size": 2}, "is the native engine's; see vllm.tensor_parallel_size"),
        (QWEN, {"vllm.tensor_parallel": 2}, "vllm.tensor_parallel"),
    ],
)
def test_what_the_schema_refuses(base: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_app_config(changed(base, changes))


def test_a_bundled_drafter_must_be_there() -> None:
    with pytest.raises(ConfigError, match=r"holds no DSpark drafter: name one"):
        problems(changed(QWEN, {"speculation.drafter": {"kind": "dspark"}}))


def test_nothing_starts_with_a_problem() -> None:
    require_sound(parse_app_config(QWEN))
    with pytest.raises(ConfigError, match=r"cannot work:\n  vllm\.engine_args\.enforce_eager: .*; remove it"):
        require_sound(parse_app_config(changed(QWEN, {"vllm.engine_args.enforce_eager": True})))


def test_unknown_shapes_are_said_to_be_unknown() -> None:
    args = changed(QWEN, {"model.source": "owner/unknown", "speculation.drafter.hub_id": "owner/drafter"})
    report = check_config(parse_app_config(args))
    assert report.memory is None
    assert [note.split(" are not known")[0] for note in report.notes] == [
        "the shapes of owner/unknown",
        "the shapes of the drafter owner/drafter",
    ]


def test_a_local_directory_is_read_and_weighed(tmp_path: Path) -> None:
    config = json.loads((SHIPPED / "Qwen/Qwen3-4B.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 4096)
    report = check_config(
        parse_app_config(changed(QWEN, {"model.source": str(tmp_path), "speculation.mode": "off"}))
    )
    assert report.memory is not None
    assert report.memory.weights == 4096
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is damaged"):
        check_config(parse_app_config(changed(QWEN, {"model.source": str(tmp_path)})))


def test_ranks_divide_the_target_and_not_our_drafter() -> None:
    one, two = (check_config(parse_app_config(changed(OURS, {RANKS: n}))).memory for n in (1, 2))
    assert one is not None
    assert two is not None
    assert two.weights == one.weights / 2
    assert two.drafter == one.drafter
    assert one.kv is not None
    assert two.kv is not None
    assert one.kv / 2 < two.kv < one.kv  # with the drafter's keys, which are rank 0's


def test_each_shipped_shape_says_where_it_is_from() -> None:
    for path in SHIPPED.rglob("*.json"):
        assert json.loads(path.read_text())["_source"], path


def test_the_served_model_of_each_configuration_is_named_after_it() -> None:
    names = {yaml.safe_load(path.read_text())["applications"][0]["args"]["model"]["id"] for path in CONFIGS}
    assert all(name == name.lower() for name in names)


def test_a_redacting_function_must_be_there_and_the_exporter_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = {"observability.request_log": {"folder": "x", "redact": "my_company.privacy:redact"}}
    assert any("no module 'my_company.privacy' here" in problem for problem in problems(changed(OURS, log)))
    log["observability.request_log"]["redact"] = "json:loads"
    assert problems(changed(OURS, log)) == []
    spans = {"observability.traces": {"endpoint": "http://collector:4318"}}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert any("pip install 'dspark-ray[tracing]'" in problem for problem in problems(changed(OURS, spans)))
