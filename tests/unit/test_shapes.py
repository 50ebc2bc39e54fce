"""Sizes from config.json against the published ones."""

import json
from typing import Any

import pytest

from dspark_ray.core.config import parse_app_config
from dspark_ray.core.errors import ConfigError
from dspark_ray.models.shapes import read_shape
from dspark_ray.preflight.drafter import read_drafter
from dspark_ray.preflight.memory import GIB, plan_memory
from dspark_ray.preflight.sources import SHIPPED


def raw(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((SHIPPED / f"{name}.json").read_text())
    return content


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 134.5e6),
        ("Qwen/Qwen3-4B", 4.022e9),
        ("Qwen/Qwen3-8B", 8.191e9),
        ("Qwen/Qwen3-14B", 14.77e9),
        ("google/gemma-4-12B-it", 11.9e9),
    ],
)
def test_parameters_are_the_published_ones(name: str, parameters: float) -> None:
    assert read_shape(raw(name), 2).weight_bytes / 2 == pytest.approx(parameters, rel=0.005)


@pytest.mark.parametrize(("size", "gigabytes"), [("4b", 2.79), ("8b", 4.74)])
def test_drafters_weigh_what_their_files_do(size: str, gigabytes: float) -> None:
    drafter = read_drafter(raw(f"deepseek-ai/dspark_qwen3_{size}_block7"), 2)
    assert drafter.weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)
    assert (drafter.block_size, drafter.mask_token_id, drafter.has_confidence_head) == (7, 151669, True)


def test_deepseek_v4_is_mostly_experts_of_four_bits() -> None:
    shape = read_shape(raw("deepseek-ai/DeepSeek-V4-Flash-DSpark"), 2)
    experts = 46 * 256 * 3 * 4096 * 2048  # 43 layers and 3 drafting stages
    assert 0.53 * experts < shape.weight_bytes < 0.6 * experts
    short, long = shape.kv_bytes(128), shape.kv_bytes(128 * 1024)
    assert short > 46 * 128 * 584  # the windows alone
    assert long < 128 * 1024 * 43 * 584 / 4  # most rows are compressed away


def test_kv_of_dense_and_windowed_layers() -> None:
    assert read_shape(raw("Qwen/Qwen3-8B"), 2).kv_bytes(10) == 10 * 2 * 36 * 8 * 128 * 2
    gemma = read_shape(raw("google/gemma-4-12B-it"), 2)
    full, windowed = 2 * 8 * 1 * 512 * 2, 2 * 40 * 8 * 256 * 2
    assert gemma.kv_bytes(1000) == 1000 * (full + windowed)
    assert gemma.kv_bytes(5000) == 5000 * full + 1024 * windowed


def test_a_speculators_checkpoint_nests_its_backbone_and_counts_taps_from_the_embedding() -> None:
    nested = {"transformer_layer_config": raw("Qwen/Qwen3-8B") | {"num_hidden_layers": 1}}
    drafter = read_drafter(nested | {"aux_hidden_state_layer_ids": [2, 10]}, 2)
    assert drafter.taps == (1, 9)
    assert drafter.hidden_size == 4096


def test_a_config_without_sizes_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no hidden_size"):
        read_shape({"model_type": "qwen3"}, 2)


def test_ranks_divide_weights_and_kv_but_no_head() -> None:
    shape = read_shape(raw("Qwen/Qwen3-8B"), 2)

    def plan(**vllm: Any) -> Any:
        args = {"engine": {"kind": "vllm", "kv_num_blocks": 1024}, "vllm": vllm, "hardware": {}}
        return plan_memory(parse_app_config(args), shape, None)

    one, two, sixteen = plan(), plan(tensor_parallel_size=2), plan(tensor_parallel_size=16)
    assert two.weights == one.weights / 2
    assert two.kv == one.kv / 2
    assert sixteen.kv == one.kv / 8  # eight KV heads: two ranks keep the same one
    assert plan(pipeline_parallel_size=2).weights == one.weights / 2
    assert one.free_for_kv is None


def test_the_native_engine_needs_what_it_is_given() -> None:
    args = {"engine": {"kv_num_blocks": 1024, "kv_block_size": 16}, "hardware": {"device_memory_gib": 32}}
    plan = plan_memory(parse_app_config(args), read_shape(raw("Qwen/Qwen3-8B"), 2), None)
    assert plan.kv == 1024 * 16 * 2 * 36 * 8 * 128 * 2
    assert plan.usable == 32 * GIB
    assert set(plan.lines()) >= {"weights", "drafter", "workspace", "KV", "usable", "free for KV"}


@pytest.mark.parametrize(
    ("scaling", "tokens"),
    [
        ({}, 40960),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 81920),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, 163840),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                }
            },
            131072,
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 40960),
    ],
)
def test_scaling_stretches_the_context(scaling: dict[str, Any], tokens: int) -> None:
    assert read_shape(raw("Qwen/Qwen3-8B") | scaling, 2).max_positions == tokens
