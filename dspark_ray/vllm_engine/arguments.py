"""From our configuration to vLLM's `AsyncEngineArgs`."""

import dataclasses
import difflib
from typing import Any

from dspark_ray.core.config import AppConfig, LoraConfig
from dspark_ray.core.errors import ConfigError
from dspark_ray.vllm_engine.speculation import speculative_config

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM sizes its buffers by


def engine_arguments(config: AppConfig, model: str) -> dict[str, Any]:
    """Keyword arguments for vLLM's `AsyncEngineArgs`. Pure: needs no vLLM.

    model: a directory, or a hub id `owner/name[@revision]`. Raises `ConfigError` for what vLLM cannot do.
    """
    engine, vllm = config.engine, config.vllm
    speculation = speculative_config(config)
    path, _, revision = (model, "", "") if model.startswith("/") else model.partition("@")
    arguments: dict[str, Any] = {
        "model": path,
        "served_model_name": config.model.id,
        "dtype": config.model.dtype,
        "max_model_len": config.model.max_model_len,
        "max_num_seqs": engine.max_running,
        "max_num_batched_tokens": engine.max_step_rows,
        "block_size": engine.kv_block_size,
        "enable_prefix_caching": engine.prefix_cache,
        "tensor_parallel_size": vllm.tensor_parallel_size,
        "pipeline_parallel_size": vllm.pipeline_parallel_size,
        "data_parallel_size": vllm.data_parallel_size,
        "enable_expert_parallel": vllm.expert_parallel,
        "distributed_executor_backend": vllm.executor,
        "scheduling_policy": "priority",  # first come, first served among equals
        "disable_log_stats": True,  # ours are read all the same; vLLM's own are not exported twice
        "speculative_config": speculation,
    }
    if revision:
        arguments |= {"revision": revision, "tokenizer_revision": revision}
    if vllm.gpu_memory_utilization is None:
        arguments["num_gpu_blocks_override"] = engine.kv_num_blocks
    else:
        arguments["gpu_memory_utilization"] = vllm.gpu_memory_utilization
    if speculation is not None:
        arguments["per_request_spec_decode_metrics"] = "summary"
    if config.lora.is_on:
        arguments |= _lora_arguments(config.lora)
    return arguments | vllm.engine_args


def _lora_arguments(lora: LoraConfig) -> dict[str, Any]:
    rank = next((rank for rank in LORA_RANKS if rank >= lora.max_rank), None)
    if rank is None:
        raise ConfigError(f"lora.max_rank {lora.max_rank}: vLLM takes at most {LORA_RANKS[-1]}")
    return {
        "enable_lora": True,
        "max_loras": lora.max_loaded,
        "max_cpu_loras": lora.max_loaded,
        "max_lora_rank": rank,
    }


def check_argument_names(names: list[str]) -> None:
    """`ConfigError` for a name that the installed vLLM's `EngineArgs` has not."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"vllm.engine_args.{name}: vLLM has no such argument{hint}")
