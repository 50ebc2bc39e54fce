"""Builds the configured engine on the thread that will run it."""

import logging
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from tokenizers import Tokenizer

from dspark_ray.core.config import AppConfig
from dspark_ray.runtime.engine_actor import EngineFactory, LoadedEngine
from dspark_ray.runtime.threads import use_threads

if TYPE_CHECKING:
    from dspark_ray.runtime.ranks import LeaderEnd

logger = logging.getLogger(__name__)

CANARY_TEXT = "The quick brown fox jumps over the lazy dog. The quick brown fox"


def native_engine(config: AppConfig, engine_id: str, leader: "LeaderEnd | None" = None) -> LoadedEngine:
    """An `EngineFactory`: target, drafter and step table of `config`. Raises `DsparkError`."""
    num_threads = use_threads(config)
    from dspark_ray.models.fetch import resolve_model, with_local_drafter
    from dspark_ray.models.targets.lora_checkpoint import adapter_ref
    from dspark_ray.profiling.cache import build_profiled_engine

    model_dir = resolve_model(config.model.source)
    logger.info("loading %s from %s with %d threads", config.model.id, model_dir, num_threads)
    config = with_local_drafter(config)
    load = None if leader is None else partial(leader.load_for, config, model_dir)
    engine = build_profiled_engine(config, model_dir=model_dir, engine_id=engine_id, load=load)
    for adapter in config.lora.adapters[: config.lora.max_loaded]:
        engine.adapters.make_ready(adapter_ref(adapter.name, Path(adapter.path)))
    return LoadedEngine(
        engine,
        _canary_prompt(model_dir),
        close=lambda: None if leader is None else leader.close(),
        prepare=engine.slow_work,
        adapters=engine.adapters,
        hot_swap=engine.hot_swap,
    )


def vllm_engine(config: AppConfig, engine_id: str) -> LoadedEngine:
    """An `EngineFactory`: vLLM's engine for `config`. Raises `DsparkError`."""
    from dspark_ray.models.fetch import is_on_hub, resolve_model
    from dspark_ray.models.targets.lora_checkpoint import adapter_ref
    from dspark_ray.vllm_engine.build import build_vllm_engine

    source = config.model.source
    # vLLM fetches from the hub itself, each rank the files it needs.
    text_dir = resolve_model(source, weights=not is_on_hub(source))
    model = source if is_on_hub(source) else str(text_dir)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    host = ray.util.get_node_ip_address() if config.vllm.executor == "ray" else "127.0.0.1"
    engine = build_vllm_engine(
        config, model=model, text_dir=text_dir, cores=cores, engine_id=engine_id, host=host
    )
    for adapter in config.lora.adapters[: config.lora.max_loaded]:
        engine.load(adapter_ref(adapter.name, Path(adapter.path)))
    adapters = engine if config.lora.is_on else None
    return LoadedEngine(engine, _canary_prompt(text_dir), engine.close, adapters=adapters)


def timed_engine(config: AppConfig, engine_id: str) -> LoadedEngine:
    """An `EngineFactory`: the engine that sleeps instead of computing. Raises `DsparkError`."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from dspark_ray.engine.timed import build_timed_engine

    torch.set_num_threads(1)
    return LoadedEngine(build_timed_engine(config, engine_id), canary_prompt=(1, 2, 3, 4))


ENGINE_FACTORIES: dict[str, EngineFactory] = {
    "native": native_engine,
    "vllm": vllm_engine,
    "timed": timed_engine,
}
"""By `engine.kind`."""


def _canary_prompt(model_dir: Path) -> tuple[int, ...]:
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        return (1, 2, 3, 4)
    return tuple(Tokenizer.from_file(str(path)).encode(CANARY_TEXT).ids)
