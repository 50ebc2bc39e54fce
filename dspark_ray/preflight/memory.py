"""The memory of one device of a replica: weights, drafter, KV, and what a step needs beside them. Pure."""

from dataclasses import dataclass

from dspark_ray.core.config import AppConfig
from dspark_ray.core.types import VerificationMode
from dspark_ray.models.shapes import Shape
from dspark_ray.preflight.drafter import DrafterShape

GIB = 2**30
_RUNTIME_BYTES = 2.0 * GIB  # of a GPU process: context, communication buffers, captured graphs
_LOGIT_BYTES = 4  # float32
_DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on each device, the largest one's. `usable` is None where nobody said what a device has."""

    weights: float
    drafter: float
    workspace: float
    kv: float | None  # None: whatever is left
    kv_longest: float  # one request of max_model_len
    usable: float | None

    @property
    def fixed(self) -> float:
        return self.weights + self.drafter + self.workspace

    @property
    def free_for_kv(self) -> float | None:
        return None if self.usable is None else self.usable - self.fixed

    def lines(self) -> dict[str, str]:
        """For people."""
        shown = {
            "weights": _gib(self.weights),
            "drafter": _gib(self.drafter),
            "workspace": _gib(self.workspace),
            "KV": "what is left" if self.kv is None else _gib(self.kv),
            "KV of the longest request": _gib(self.kv_longest),
        }
        if self.usable is not None:
            room = self.free_for_kv or 0.0
            shown["usable"] = _gib(self.usable)
            shown["free for KV"] = f"{_gib(room)}: {max(0.0, room / self.kv_longest):.1f} longest requests"
        return shown


def plan_memory(config: AppConfig, target: Shape, drafter: DrafterShape | None) -> MemoryPlan:
    """The plan of one rank, the first. Tensor parallelism divides matrices and KV heads (no finer than one
    head), but not our own drafter, which is rank 0's; pipeline stages divide layers; data-parallel ranks hold
    everything, but experts once per expert group."""
    vllm, speculation = config.vllm, config.speculation
    is_vllm = config.engine.kind == "vllm"
    tensor = vllm.tensor_parallel_size if is_vllm else config.engine.tensor_parallel_size
    drafter_parts = tensor if is_vllm else 1
    pipeline = vllm.pipeline_parallel_size if is_vllm else 1
    sharded = tensor * (vllm.data_parallel_size if is_vllm and vllm.expert_parallel and target.is_moe else 1)
    kv_parts = min(tensor, target.num_kv_heads) * pipeline
    drafts = speculation.num_draft_tokens if _speculates(config) else 0
    rows = config.engine.max_running * (drafts + 1)
    logits = rows * target.vocab_size / tensor * _LOGIT_BYTES
    # A drafter's own distributions wait for the verdict.
    kept = rows * target.vocab_size * _LOGIT_BYTES if _keeps_distributions(config) else 0.0
    on_gpu = is_vllm and vllm.device == "gpu"
    per_token = drafter.kv_bytes_per_token if drafter and _speculates(config) else 0.0

    # Drafters keep theirs in the model's type.
    kv_share = 1 / _DTYPE_BYTES[config.model.dtype] if config.engine.kv_dtype == "fp8" else 1.0

    def kv(tokens: int) -> float:
        drafters = per_token * tokens / (kv_parts if is_vllm else 1)
        return target.kv_bytes(tokens) * kv_share / kv_parts + drafters

    fills = is_vllm and vllm.gpu_memory_utilization is not None
    return MemoryPlan(
        weights=target.weight_bytes / (sharded * pipeline),
        drafter=drafter.weight_bytes / drafter_parts if drafter and _speculates(config) else 0.0,
        workspace=logits + kept + (_RUNTIME_BYTES if on_gpu else 0.0),
        kv=None if fills else kv(config.engine.kv_num_blocks * config.engine.kv_block_size),
        kv_longest=kv(config.model.max_model_len),
        usable=_usable(config),
    )


def _speculates(config: AppConfig) -> bool:
    speculation = config.speculation
    return speculation.drafter.kind != "none" and speculation.mode is not VerificationMode.OFF


def _keeps_distributions(config: AppConfig) -> bool:
    if not _speculates(config) or config.speculation.drafter.kind == "ngram":
        return False
    return config.engine.kind != "vllm" or config.vllm.draft_sample_method == "probabilistic"


def _usable(config: AppConfig) -> float | None:
    memory = config.hardware.device_memory_gib
    if memory is None:
        return None
    share = config.vllm.gpu_memory_utilization if config.engine.kind == "vllm" else None
    return memory * GIB * (share or 1.0)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
