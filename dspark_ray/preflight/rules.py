"""The rules: each looks at one thing and yields what is wrong with it, with the cure.

`RULES` run for every configuration that the schema accepts. A rule that needs a shape nobody knows yields
nothing. What vLLM refuses is taken from vLLM 0.32's own checks, and found here before anything starts.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from dspark_ray.core.config import AppConfig
from dspark_ray.core.errors import CheckpointError
from dspark_ray.core.types import VerificationMode
from dspark_ray.models.shapes import Shape
from dspark_ray.models.targets.lora_checkpoint import read_settings
from dspark_ray.models.targets.shard import fitting_sizes
from dspark_ray.preflight.drafter import DrafterShape
from dspark_ray.preflight.memory import GIB, MemoryPlan
from dspark_ray.preflight.problem import Problem
from dspark_ray.vllm_engine.arguments import LORA_RANKS
from dspark_ray.vllm_engine.speculation import is_adaptive

NATIVE_TARGETS = ("llama", "mistral", "qwen2", "qwen3")
# Their captured graphs replay batches of any lengths; FLASH_ATTN's do with version 3, on Hopper.
_VARLEN_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "ROCM_ATTN")
_FULL_GRAPH_MODES = ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
_WITHOUT = "or set speculation.mode to fixed"


@dataclass(frozen=True, slots=True)
class Facts:
    """A configuration and what is known of its models."""

    config: AppConfig
    target: Shape | None = None
    drafter: DrafterShape | None = None
    memory: MemoryPlan | None = None


Rule = Callable[[Facts], Iterator[Problem]]


def engine_runs_the_target(facts: Facts) -> Iterator[Problem]:
    target = facts.target
    if target is None:
        return
    if facts.config.engine.kind == "native" and target.model_type not in NATIVE_TARGETS:
        yield Problem(
            "model.source",
            f"the native engine does not run model_type {target.model_type!r}",
            "set engine.kind to vllm",
        )
    longest = facts.config.model.max_model_len
    if target.max_positions is not None and longest > target.max_positions:
        yield Problem(
            "model.max_model_len",
            f"{longest} tokens, and the model was made for {target.max_positions}",
            f"set it to at most {target.max_positions}",
        )


def drafter_fits_the_target(facts: Facts) -> Iterator[Problem]:
    target, drafter = facts.target, facts.drafter
    if target is None or drafter is None:
        return
    key = "speculation.drafter"
    cure = "take a drafter that was trained for this target"
    if drafter.hidden_size not in (None, target.hidden_size):
        reason = f"it reads states of size {drafter.hidden_size}, the target's are {target.hidden_size}"
        yield Problem(key, reason, cure)
    if drafter.vocab_size not in (None, target.vocab_size):
        reason = f"its vocabulary has {drafter.vocab_size} tokens, the target's {target.vocab_size}"
        yield Problem(key, reason, cure)
    if drafter.num_target_layers not in (None, target.num_layers):
        reason = f"it was trained for {drafter.num_target_layers} layers, the target has {target.num_layers}"
        yield Problem(key, reason, cure)
    if drafter.mask_token_id is not None and drafter.mask_token_id >= target.vocab_size:
        reason = f"its mask token {drafter.mask_token_id} is outside the vocabulary of {target.vocab_size}"
        yield Problem(key, reason, cure)


def taps_are_layers_of_the_target(facts: Facts) -> Iterator[Problem]:
    target, drafter = facts.target, facts.drafter
    if target is None or drafter is None or drafter.taps is None:
        return
    taps = drafter.taps
    if any(a >= b for a, b in pairwise(taps)):
        reason = f"its tap layers {list(taps)} do not increase"
    elif taps[0] < -1 or taps[-1] >= target.num_layers:
        reason = f"its tap layers {list(taps)} are not layers of a target with {target.num_layers}"
    else:
        return
    yield Problem(
        "speculation.drafter", reason, "correct target_layer_ids in its config.json, or take another"
    )


def drafts_fit_the_block(facts: Facts) -> Iterator[Problem]:
    """A block drafter has trained slots for its block size and no more."""
    drafter, wanted = facts.drafter, facts.config.speculation.num_draft_tokens
    if drafter is None or drafter.block_size is None or facts.config.speculation.drafter.kind != "dspark":
        return
    if wanted > drafter.block_size:
        yield Problem(
            "speculation.num_draft_tokens",
            f"{wanted} tokens from a drafter whose block has {drafter.block_size}",
            f"set it to at most {drafter.block_size}",
        )


def drafts_fit_a_step(facts: Facts) -> Iterator[Problem]:
    """vLLM sizes its buffers by max_step_rows and indexes them by requests × (k + 1)."""
    config = facts.config
    if config.engine.kind != "vllm" or config.speculation.drafter.kind == "none":
        return
    per_request = config.speculation.num_draft_tokens + 1
    running, room = config.engine.max_running, config.engine.max_step_rows
    rows = running * per_request
    if rows > room:
        yield Problem(
            "engine.max_step_rows",
            f"{running} requests with {per_request - 1} drafted tokens each are {rows} rows, and a step "
            f"has {room}",
            f"set it to at least {rows}, or max_running to at most {room // per_request}",
        )


def adaptive_verification_is_possible(facts: Facts) -> Iterator[Problem]:
    """What stands in the way of vLLM's adaptive verification."""
    config = facts.config
    if config.speculation.mode is not VerificationMode.ADAPTIVE:
        return
    if facts.drafter is not None and facts.drafter.has_confidence_head is False:
        yield Problem(
            "speculation.mode",
            "adaptive needs confidences and the drafter has no confidence head",
            "set it to fixed, or take a drafter trained with one",
        )
    if config.engine.kind != "vllm" or not is_adaptive(config):
        return
    args, key = config.vllm.engine_args, "vllm.engine_args"
    if args.get("enforce_eager"):
        yield Problem(
            f"{key}.enforce_eager",
            "vLLM's adaptive verification replays captured CUDA graphs and eager mode has none",
            f"remove it, {_WITHOUT}",
        )
    if config.lora.is_on:
        yield Problem(
            "lora",
            "vLLM maps adapters to tokens before its adaptive verification has chosen them",
            f"serve without adapters, {_WITHOUT}",
        )
    if config.vllm.pipeline_parallel_size > 1:
        yield Problem(
            "vllm.pipeline_parallel_size",
            "vLLM's adaptive verification knows confidences on the last pipeline stage only",
            f"set it to 1 and raise tensor_parallel_size, {_WITHOUT}",
        )
    if config.vllm.speculative_args.get("use_local_argmax_reduction"):
        yield Problem(
            "vllm.speculative_args.use_local_argmax_reduction",
            "confidences are read from draft logits that it never gathers",
            f"remove it, {_WITHOUT}",
        )
    backend = args.get("attention_backend")
    if backend is not None and str(backend).upper() not in _VARLEN_BACKENDS:
        yield Problem(
            f"{key}.attention_backend",
            f"{backend} cannot replay batches whose lengths are decided on the device (FLASHINFER can on "
            "Blackwell only, where vLLM chooses it by itself)",
            f"remove it or take one of {', '.join(_VARLEN_BACKENDS)}, {_WITHOUT}",
        )
    mode = _graph_mode(args.get("compilation_config"))
    if mode is not None and mode not in _FULL_GRAPH_MODES:
        yield Problem(
            f"{key}.compilation_config.cudagraph_mode",
            f"vLLM's adaptive verification needs full CUDA graphs, and this is {mode}",
            f"set it to one of {', '.join(_FULL_GRAPH_MODES)}, {_WITHOUT}",
        )


def mode_exists(facts: Facts) -> Iterator[Problem]:
    """vLLM has fewer verification modes than the native engine."""
    speculation = facts.config.speculation
    if facts.config.engine.kind != "vllm" or speculation.drafter.kind == "none":
        return
    cure = "set it to fixed or off, or engine.kind to native"
    if speculation.mode in (VerificationMode.THRESHOLD, VerificationMode.ALGORITHM1):
        yield Problem("speculation.mode", f"vLLM has no mode {speculation.mode.value}", cure)
    if speculation.mode is VerificationMode.ADAPTIVE and speculation.drafter.kind != "dspark":
        reason = f"vLLM verifies adaptively with dspark only, not with {speculation.drafter.kind}"
        yield Problem("speculation.mode", reason, cure)
    if speculation.mode is VerificationMode.FIXED and speculation.fixed_tokens == 0:
        yield Problem("speculation.fixed_tokens", "vLLM drafts what it verifies", "set mode to off")
    for name in ("temperatures", "step_table"):
        if getattr(speculation, name) is not None:
            yield Problem(f"speculation.{name}", "vLLM calibrates and profiles by itself", "remove it")


def device_runs_the_drafter(facts: Facts) -> Iterator[Problem]:
    config = facts.config
    if config.engine.kind != "vllm" or config.vllm.device != "cpu":
        return
    if config.speculation.drafter.kind in ("dspark", "dflash") and config.speculation.mode != "off":
        yield Problem(
            "vllm.device",
            f"vLLM drafts with {config.speculation.drafter.kind} through Triton, which has no CPU backend",
            "use ngram, draft_model or eagle3 on a CPU, or set engine.kind to native",
        )
    if config.vllm.world_size > 1:
        yield Problem("vllm.device", "several ranks on a CPU are not supported here", "use one rank")


def ranks_divide_the_model(facts: Facts) -> Iterator[Problem]:
    config, target = facts.config, facts.target
    vllm = config.vllm
    if config.engine.kind != "vllm" or target is None:
        return
    tensor, key = vllm.tensor_parallel_size, "vllm.tensor_parallel_size"
    if target.num_heads % tensor:
        yield Problem(
            key,
            f"{tensor} ranks do not divide {target.num_heads} attention heads",
            f"use one of {_divisors(target.num_heads)}",
        )
    elif target.head_groups % tensor and target.head_groups > 1:
        yield Problem(
            key,
            f"{tensor} ranks do not divide {target.head_groups} output groups",
            f"use one of {_divisors(target.head_groups)}",
        )
    elif target.num_kv_heads % tensor and tensor % target.num_kv_heads:
        yield Problem(
            key,
            f"{target.num_kv_heads} KV heads and {tensor} ranks: neither divides the other",
            f"use one of {_divisors(target.num_kv_heads)}",
        )
    if vllm.pipeline_parallel_size > target.num_layers:
        yield Problem(
            "vllm.pipeline_parallel_size",
            f"{vllm.pipeline_parallel_size} stages of a model with {target.num_layers} layers",
            f"use at most {target.num_layers}",
        )
    experts_over = tensor * vllm.data_parallel_size
    if vllm.expert_parallel and not target.is_moe:
        yield Problem("vllm.expert_parallel", "the model has no experts", "set it to false")
    elif vllm.expert_parallel and target.num_experts % experts_over:
        yield Problem(
            "vllm.expert_parallel",
            f"{experts_over} ranks do not divide {target.num_experts} experts",
            "change tensor_parallel_size or data_parallel_size",
        )


def ranks_divide_the_target(facts: Facts) -> Iterator[Problem]:
    """The native engine's ranks: of a number that divides heads and MLP, and what they do not carry."""
    config, target = facts.config, facts.target
    count, key = config.engine.tensor_parallel_size, "engine.tensor_parallel_size"
    if count == 1:
        return
    if target is not None and target.intermediate_size is not None:
        sizes = fitting_sizes(target.num_heads, target.num_kv_heads, target.intermediate_size)
        if count not in sizes:
            yield Problem(
                key,
                f"{count} ranks do not divide {target.num_heads} attention heads, {target.num_kv_heads} KV "
                f"heads and an inner width of {target.intermediate_size}",
                f"use one of {', '.join(map(str, sizes))}",
            )
    if config.engine.deterministic and count > 2:
        yield Problem(
            "engine.deterministic",
            f"{count} ranks add up in an order that depends on the batch; two numbers have one sum",
            f"set {key} to 1 or 2",
        )
    per_node = config.hardware.devices_per_node
    if config.engine.rank_placement == "STRICT_PACK" and per_node is not None and count > per_node:
        yield Problem(
            "engine.rank_placement",
            f"STRICT_PACK keeps all {count} ranks on one node, and a node has {per_node} devices",
            "set it to PACK",
        )


def ranks_fit_the_nodes(facts: Facts) -> Iterator[Problem]:
    config = facts.config
    per_node = config.hardware.devices_per_node
    if config.engine.kind != "vllm" or config.vllm.device == "cpu" or per_node is None:
        return
    if config.vllm.executor == "mp" and config.vllm.world_size > per_node:
        yield Problem(
            "vllm.executor",
            f"mp keeps all {config.vllm.world_size} ranks on one node, and a node has {per_node} devices",
            "set it to ray",
        )


def memory_suffices(facts: Facts) -> Iterator[Problem]:
    memory, config = facts.memory, facts.config
    if memory is None or memory.free_for_kv is None:
        return
    room = memory.free_for_kv
    more_ranks = f"raise {'vllm' if config.engine.kind == 'vllm' else 'engine'}.tensor_parallel_size"
    if room <= 0:
        yield Problem(
            "hardware.device_memory_gib",
            f"weights, drafter and workspace take {memory.fixed / GIB:.1f} GiB of each device and "
            f"{(memory.usable or 0) / GIB:.1f} GiB may be used",
            f"{more_ranks}, or take a larger device or smaller weights",
        )
    elif room < memory.kv_longest:
        fitting = int(config.model.max_model_len * room / memory.kv_longest)
        yield Problem(
            "model.max_model_len",
            f"the KV of one request of {config.model.max_model_len} tokens is "
            f"{memory.kv_longest / GIB:.2f} GiB on each device and {room / GIB:.2f} GiB are free for it",
            f"set it to at most {fitting}, or {more_ranks}",
        )
    elif memory.kv is not None and room < memory.kv:
        fitting = int(config.engine.kv_num_blocks * room / memory.kv)
        yield Problem(
            "engine.kv_num_blocks",
            f"{config.engine.kv_num_blocks} blocks take {memory.kv / GIB:.2f} GiB of each device and "
            f"{room / GIB:.2f} GiB are free for KV",
            f"set it to at most {fitting}",
        )


def quantization_is_the_engines(facts: Facts) -> Iterator[Problem]:
    config = facts.config
    if config.engine.kind == "vllm" and config.model.quantization != "none":
        yield Problem(
            "model.quantization",
            f"{config.model.quantization} weights are made by the native engine",
            "set it to none and name a quantised checkpoint, or use vllm.engine_args.quantization",
        )


def adapters_can_be_served(facts: Facts) -> Iterator[Problem]:
    lora = facts.config.lora
    for adapter in lora.adapters:
        try:
            read_settings(Path(adapter.path), lora.max_rank)
        except CheckpointError as error:
            yield Problem(f"lora.adapters.{adapter.name}", str(error), "correct it, or leave it out")
    if facts.config.engine.kind == "vllm" and lora.is_on and lora.max_rank > LORA_RANKS[-1]:
        yield Problem(
            "lora.max_rank",
            f"{lora.max_rank}, and vLLM serves ranks up to {LORA_RANKS[-1]}",
            f"set it to at most {LORA_RANKS[-1]}",
        )


def scheduler_reaches_the_engine(facts: Facts) -> Iterator[Problem]:
    """Plans reach vLLM where it chooses budgets itself, and say nothing of which tokens fill them."""
    config = facts.config
    policy = config.scheduler.policy
    if config.engine.kind != "vllm" or policy == "local":
        return
    key, cure = "scheduler.policy", "set it to local, or engine.kind to native"
    if not is_adaptive(config):
        yield Problem(
            key,
            f"{policy} limits budgets, and vLLM chooses none without adaptive verification",
            "set speculation.mode to adaptive (drafter kind dspark), or the policy to local",
        )
    if policy == "weighted":
        yield Problem(key, "vLLM ranks draft tokens on the device, by survival alone", cure)
    if config.vllm.data_parallel_size > 1:
        yield Problem(
            "vllm.data_parallel_size",
            f"each of {config.vllm.data_parallel_size} cores would take the replica's whole share",
            "set it to 1 and raise serving.num_replicas, or set scheduler.policy to local",
        )


def what_is_written_can_be(facts: Facts) -> Iterator[Problem]:
    """Spans need a package, a log of prompts the function that redacts it: found where the servers start."""
    observed = facts.config.observability
    if observed.traces is not None and not _is_there("opentelemetry.exporter.otlp.proto.http"):
        yield Problem(
            "observability.traces", "the OTLP exporter is not installed", "pip install 'dspark-ray[tracing]'"
        )
    if observed.request_log is not None and (name := observed.request_log.redact) is not None:
        module = name.partition(":")[0]
        if not _is_there(module):
            yield Problem(
                "observability.request_log.redact",
                f"there is no module {module!r} here",
                "install it on every node, or leave redact out",
            )


RULES: tuple[Rule, ...] = (
    engine_runs_the_target,
    mode_exists,
    device_runs_the_drafter,
    drafter_fits_the_target,
    taps_are_layers_of_the_target,
    drafts_fit_the_block,
    drafts_fit_a_step,
    adaptive_verification_is_possible,
    ranks_divide_the_model,
    ranks_divide_the_target,
    ranks_fit_the_nodes,
    memory_suffices,
    quantization_is_the_engines,
    adapters_can_be_served,
    scheduler_reaches_the_engine,
    what_is_written_can_be,
)


def _is_there(module: str) -> bool:
    """Whether it can be imported, without running it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that it would be in
        return False


def _graph_mode(compilation: object) -> str | None:
    mode = compilation.get("cudagraph_mode") if isinstance(compilation, dict) else None
    return None if mode is None else str(mode).upper()


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
