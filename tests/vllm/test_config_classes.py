"""Shipped configurations through vLLM's own configuration classes, with the shapes that ship beside them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dspark_ray.core.config import AppConfig, load_app_config
from dspark_ray.core.errors import ConfigError
from dspark_ray.preflight.sources import SHIPPED
from dspark_ray.vllm_engine.arguments import check_argument_names, engine_arguments
from dspark_ray.vllm_engine.speculation import is_adaptive

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[2]
SERVED = [load_app_config(path) for path in sorted((ROOT / "configs").glob("*.yaml"))]
VLLM = [config for config in SERVED if config.engine.kind == "vllm"]
QWEN_DSPARK = [
    config
    for config in VLLM
    if config.model.source.startswith("Qwen/") and config.speculation.drafter.kind == "dspark"
]


def directory(folder: Path, hub_id: str) -> str:
    """A model directory with the shipped shapes, and what vLLM's classes want beside them."""
    path = folder / hub_id.replace("/", "--")
    path.mkdir()
    config = json.loads((SHIPPED / f"{hub_id}.json").read_text())
    rest = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "dtype": "bfloat16"}
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k[0] != "_"} | rest))
    return str(path)


@pytest.mark.parametrize("config", VLLM, ids=lambda config: config.model.id)
def test_every_argument_is_one_of_vllms(config: AppConfig) -> None:
    from vllm.config import SpeculativeConfig

    args = engine_arguments(config, "owner/name")
    check_argument_names(list(args))
    known = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    assert set(args["speculative_config"] or {}) <= known


def test_an_unknown_argument_is_named_with_a_near_one() -> None:
    with pytest.raises(ConfigError, match=r"has no such argument; did you mean 'enforce_eager'"):
        check_argument_names(["enforce_eagre"])


@pytest.mark.parametrize("config", QWEN_DSPARK, ids=lambda config: f"{config.model.id}")
def test_vllm_makes_the_same_of_a_dspark_section(config: AppConfig, tmp_path: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    drafter = config.speculation.drafter
    assert drafter.hub_id is not None
    local = drafter.model_copy(update={"path": directory(tmp_path, drafter.hub_id), "hub_id": None})
    speculation = config.speculation.model_copy(update={"drafter": local})
    args = engine_arguments(
        config.model_copy(update={"speculation": speculation}), directory(tmp_path, config.model.source)
    )
    made = _speculative_config(AsyncEngineArgs(**args, skip_tokenizer_init=True))
    assert (made.method, made.num_speculative_tokens) == ("dspark", config.speculation.num_draft_tokens)
    assert made.enable_adaptive_verification is is_adaptive(config) is True
    assert made.draft_sample_method == "probabilistic"
    assert made.draft_model_config.hf_config.block_size == 7


def _speculative_config(args: Any) -> Any:
    from vllm.config import ParallelConfig

    parallel = ParallelConfig()  # of one rank: this machine has no devices to divide among more
    return args.create_speculative_config(args.create_model_config(), parallel)
