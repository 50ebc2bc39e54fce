"""From a configuration and a model directory to a running engine."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from dspark_kernels import torch_ops
from dspark_kernels.dispatch import cuda_version

from dspark_ray.core.clock import Clock, SystemClock
from dspark_ray.core.config import MODEL_FREE_DRAFTERS, AppConfig
from dspark_ray.core.errors import ConfigError
from dspark_ray.core.types import SwapOrder, VerificationMode
from dspark_ray.engine.attention_choice import choose_attention
from dspark_ray.engine.device import choose_device
from dspark_ray.engine.device_memory import check_fits, device_needs
from dspark_ray.engine.engine import NOT_INVARIANT, Engine
from dspark_ray.engine.grammar import Grammars
from dspark_ray.engine.graphs import GraphedTarget
from dspark_ray.engine.hot_swap import HotSwap
from dspark_ray.engine.recorder import StepRecorder
from dspark_ray.models.drafters import dspark, eagle, ngram  # noqa: F401  (they register themselves)
from dspark_ray.models.drafters.base import DRAFTERS, Drafter, DrafterContext, GraphedDrafter
from dspark_ray.models.graphs import Capturer, CudaCapturer
from dspark_ray.models.targets.decoder import Decoder, load_target
from dspark_ray.scheduling.step_table import StepTable

logger = logging.getLogger(__name__)

_FLOAT8_CAPABILITY = (8, 9)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
KV_DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
"""engine.kv_dtype → of the target's KV cache; None: the model's own."""

TargetLoader = Callable[[], Decoder]


def build_engine(
    config: AppConfig,
    *,
    model_dir: Path,
    engine_id: str = "engine",
    clock: Clock | None = None,
    table: StepTable | None = None,
    load: TargetLoader | None = None,
) -> Engine:
    """Loads target and drafter. `table` None: no step costs are known (profiling/ measures them). `load`: of
    a target that other processes share; None: this one has all of it."""
    target = _load_whole(config, model_dir) if load is None else load()
    if config.engine.deterministic and not target.is_batch_invariant:
        raise ConfigError(f"engine.deterministic: {NOT_INVARIANT}")
    drafter = build_drafter(config, target)
    if table is None and config.speculation.step_table is not None:
        table = StepTable.load(Path(config.speculation.step_table))
    clock = clock or SystemClock()
    engine = Engine(
        config,
        target,
        drafter,
        table,
        clock,
        engine_id=engine_id,
        eos_token_ids=eos_token_ids(model_dir),
        grammars=Grammars.of_model(model_dir),
    )
    capturer = _capturer(config, target)
    if config.engine.tensor_parallel_size == 1:
        target.attention = choose_attention(config, target, engine.kv, captures=capturer is not None)
    if capturer is not None:
        _capture(engine, capturer)
    engine.hot_swap = HotSwap(
        engine,
        lambda order: build_candidate(config, target, order, capturer),
        target.config.vocab_size,
        clock,
    )
    if config.observability.record_path is not None:
        engine.recorder = StepRecorder(Path(config.observability.record_path), engine_id, clock)
    return engine


def _capturer(config: AppConfig, target: Decoder) -> Capturer | None:
    """Of CUDA graphs, where kernels run that read nothing back in a pass."""
    if target.device.type != "cuda" or not config.engine.cuda_graphs:
        return None
    if not target.can_be_captured:
        logger.warning("no CUDA graphs: several ranks run their passes as they are told")
        return None
    if cuda_version() is torch_ops:
        logger.warning("no CUDA graphs: the torch reference of the kernels reads lengths back in a pass")
        return None
    return CudaCapturer()


def _capture(engine: Engine, capturer: Capturer) -> None:
    """The passes of target and drafter, all sizes."""
    drafter = engine.drafter
    engine.graphs = GraphedTarget(engine.config, engine.target, engine.kv, capturer)
    engine.graphs.capture_all(drafter.taps if drafter else ())
    logger.info("CUDA graphs of %d sizes up to %d rows", len(engine.graphs.sizes), engine.graphs.sizes[-1])
    if isinstance(drafter, GraphedDrafter):
        drafter.use_graphs(capturer, engine.config.engine.max_running)
        drafter.capture_all()


def _load_whole(config: AppConfig, model_dir: Path) -> Decoder:
    model = config.model
    if config.engine.tensor_parallel_size > 1:
        raise ConfigError(
            f"engine.tensor_parallel_size is {config.engine.tensor_parallel_size}, and this starts no other "
            "ranks: set it to 1, or use `dspark-ray`"
        )
    device = choose_device(model.device)
    check_kv_dtype(config, device)
    if device.type == "cuda":
        check_fits(device_needs(config, model_dir), config, torch.cuda.mem_get_info(device)[0])
    return load_target(
        model_dir,
        DTYPES[model.dtype],
        model.max_model_len,
        model.quantization,
        device=device,
        kv_dtype=KV_DTYPES[config.engine.kv_dtype],
    )


def check_kv_dtype(config: AppConfig, device: torch.device) -> None:
    """`ConfigError` for a GPU without float8 where the cache is kept in it; a warning for a CPU."""
    if config.engine.kv_dtype != "fp8":
        return
    if device.type == "cpu":
        logger.warning(
            "engine.kv_dtype: fp8 halves the KV cache; on a CPU, torch reads it, several times slower"
        )
    elif (capability := torch.cuda.get_device_capability(device)) < _FLOAT8_CAPABILITY:
        raise ConfigError(
            f"engine.kv_dtype is fp8, which needs a GPU of compute capability "
            f"{'.'.join(map(str, _FLOAT8_CAPABILITY))} or later, and this one has "
            f"{'.'.join(map(str, capability))}: set it to auto"
        )


def build_drafter(config: AppConfig, target: Decoder) -> Drafter | None:
    """The configured drafter, or None when nothing would ever be verified."""
    speculation = config.speculation
    if speculation.drafter.kind == "none" or speculation.mode is VerificationMode.OFF:
        return None
    context = DrafterContext(
        target=target,
        num_draft_tokens=speculation.num_draft_tokens,
        num_slots=config.engine.kv_num_blocks * config.engine.kv_block_size,
        kv_block_size=config.engine.kv_block_size,
        max_positions=config.model.max_model_len,
        path=speculation.drafter.path,
        temperatures=speculation.temperatures,
        confidence=speculation.confidence,
        ngram_min=speculation.drafter.ngram_min,
        ngram_max=speculation.drafter.ngram_max,
    )
    return DRAFTERS.get(speculation.drafter.kind)(context)


def build_candidate(
    config: AppConfig, target: Decoder, order: SwapOrder, capturer: Capturer | None = None
) -> Drafter:
    """The drafter of an order, beside the one that serves; its passes are captured when they come. Raises
    what `build_drafter` raises."""
    speculation = config.speculation
    kind = order.kind or speculation.drafter.kind
    if kind not in DRAFTERS.names() or kind in MODEL_FREE_DRAFTERS:
        raise ConfigError(f"drafter kind {kind!r} has no checkpoint to be swapped")
    named = speculation.drafter.model_copy(update={"kind": kind, "path": order.path, "hub_id": None})
    changed = speculation.model_copy(update={"drafter": named, "temperatures": order.temperatures})
    drafter = build_drafter(config.model_copy(update={"speculation": changed}), target)
    assert drafter is not None, "speculation is on: something drafts already"
    if capturer is not None and isinstance(drafter, GraphedDrafter):
        drafter.use_graphs(capturer, config.engine.max_running)
    return drafter


def eos_token_ids(model_dir: Path) -> tuple[int, ...]:
    """End-of-sequence ids of a Hugging Face directory (generation_config.json and config.json)."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        if path.is_file():
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            values = value if isinstance(value, list) else [value]
            found += [v for v in values if isinstance(v, int) and v not in found]
    return tuple(found)
