"""What vLLM's engine takes beside the keys that both engines share (`engine.kind: vllm`)."""

from typing import Any, Literal

from pydantic import Field, model_validator

from dspark_ray.core.section import Section

# vLLM's arguments that our own keys set: named here they would contradict them.
OWNED_ENGINE_ARGS = {
    "model": "model.source",
    "served_model_name": "model.id",
    "dtype": "model.dtype",
    "max_model_len": "model.max_model_len",
    "max_num_seqs": "engine.max_running",
    "max_num_batched_tokens": "engine.max_step_rows",
    "block_size": "engine.kv_block_size",
    "num_gpu_blocks_override": "engine.kv_num_blocks",
    "enable_prefix_caching": "engine.prefix_cache",
    "tensor_parallel_size": "vllm.tensor_parallel_size",
    "pipeline_parallel_size": "vllm.pipeline_parallel_size",
    "data_parallel_size": "vllm.data_parallel_size",
    "enable_expert_parallel": "vllm.expert_parallel",
    "distributed_executor_backend": "vllm.executor",
    "gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "speculative_config": "speculation",
    "enable_lora": "lora.adapters or lora.load_from",
    "max_loras": "lora.max_loaded",
    "max_cpu_loras": "lora.max_loaded",
    "max_lora_rank": "lora.max_rank",
}
OWNED_SPECULATIVE_ARGS = {
    "method": "speculation.drafter.kind",
    "model": "speculation.drafter.path or hub_id",
    "revision": "speculation.drafter.hub_id (owner/name@revision)",
    "num_speculative_tokens": "speculation.num_draft_tokens",
    "prompt_lookup_min": "speculation.drafter.ngram_min",
    "prompt_lookup_max": "speculation.drafter.ngram_max",
    "draft_sample_method": "vllm.draft_sample_method",
    "enable_adaptive_verification": "speculation.mode",
}


class VllmConfig(Section):
    """One vLLM engine: its devices, its memory, and arguments of its own."""

    device: Literal["gpu", "cpu"] = "gpu"
    tensor_parallel_size: int = Field(1, ge=1)
    pipeline_parallel_size: int = Field(1, ge=1)
    data_parallel_size: int = Field(1, ge=1, description="within one replica; see serving.num_replicas")
    expert_parallel: bool = Field(False, description="experts over the tensor and data parallel ranks")
    executor: Literal["mp", "ray"] = Field(
        "mp", description="mp: all ranks on one node; ray: a bundle of the replica's placement group each"
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of a device that weights and KV may fill; None: engine.kv_num_blocks of KV",
    )
    draft_sample_method: Literal["probabilistic", "greedy"] = Field(
        "probabilistic", description="how a model that drafts samples, and so what its tokens are judged by"
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="any other argument of vLLM's EngineArgs, by its name there"
    )

    speculative_args: dict[str, Any] = Field(
        default_factory=dict, description="any other key of vLLM's SpeculativeConfig"
    )

    @property
    def world_size(self) -> int:
        """Devices of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @model_validator(mode="after")
    def _check(self) -> "VllmConfig":
        for key, owned in (("engine_args", OWNED_ENGINE_ARGS), ("speculative_args", OWNED_SPECULATIVE_ARGS)):
            for name in getattr(self, key):
                if name in owned:
                    raise ValueError(f"vllm.{key}.{name} is set by {owned[name]}: use that key")
        if self.executor == "ray" and self.data_parallel_size > 1:
            raise ValueError(
                "vllm.data_parallel_size over Ray makes placement groups of its own inside the replica's: "
                "raise tensor_parallel_size (with expert_parallel for experts over nodes), or use "
                "serving.num_replicas"
            )
        if self.executor == "ray" and self.device == "cpu":
            raise ValueError("vllm.executor ray needs device gpu: a CPU replica is one process")
        return self
