"""From a configuration to a running vLLM engine."""

import json
import os
from pathlib import Path
from typing import Any

from dspark_ray.core.config import AppConfig
from dspark_ray.core.errors import ConfigError, EngineDeadError
from dspark_ray.models.shapes import read_shape
from dspark_ray.vllm_engine.arguments import check_argument_names, engine_arguments
from dspark_ray.vllm_engine.engine import VllmEngine
from dspark_ray.vllm_engine.environment import cpu_environment
from dspark_ray.vllm_engine.link import PlanLink
from dspark_ray.vllm_engine.plugin import ENTRY_POINT, is_loaded_by_vllm
from dspark_ray.vllm_engine.speculation import is_adaptive
from dspark_ray.vllm_engine.version import require_vllm

_DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
_KV_SLACK = 1.1


def build_vllm_engine(
    config: AppConfig, *, model: str, text_dir: Path, cores: list[int], engine_id: str, host: str
) -> VllmEngine:
    """Starts vLLM and loads the model; may take minutes.

    model: a directory or a hub id; text_dir: where its config.json is here; host: this machine's address, as
    all ranks reach it. Raises `ConfigError` for a vLLM
    that is absent or untested and for a configuration that vLLM refuses, `EngineDeadError` if it does not
    start.
    """
    version = require_vllm()
    arguments = engine_arguments(config, model)
    os.environ["VLLM_NO_USAGE_STATS"] = "1"  # nothing leaves the machine
    if config.vllm.device == "cpu":
        os.environ.update(cpu_environment(config, cores))
        if config.vllm.gpu_memory_utilization is None:
            arguments = {"kv_cache_memory_bytes": _kv_bytes(config, text_dir), **arguments}
    from dspark_ray.vllm_engine.client import AsyncLLMClient

    check_argument_names(list(config.vllm.engine_args))
    link = _plan_link(config, host)
    try:
        return VllmEngine(
            config,
            lambda counters: AsyncLLMClient.connect(arguments, counters),
            _description(config, model, version),
            engine_id=engine_id,
            link=link,
        )
    except (ValueError, NotImplementedError, ImportError) as error:  # what its configuration classes raise
        raise ConfigError(f"vLLM {version} refuses this configuration: {error}") from error
    except RuntimeError as error:  # its processes have said why in the log
        raise EngineDeadError(f"vLLM {version} did not start: {error}") from error


def _plan_link(config: AppConfig, host: str) -> PlanLink | None:
    """To vLLM's scheduler, where vLLM chooses budgets; its processes find it by their environment."""
    if not is_adaptive(config):
        return None
    if not is_loaded_by_vllm():
        if config.scheduler.policy == "local":  # its plans say nothing
            return None
        raise ConfigError(
            f"scheduler.policy {config.scheduler.policy}: vLLM does not load this program's plugin "
            f"{ENTRY_POINT!r}; install the package (pip install -e .) instead of adding it to the path, and "
            "name the plugin in VLLM_PLUGINS if that is set"
        )
    link = PlanLink(f"tcp://{host}")
    os.environ.update(link.addresses.environment())
    return link


def _kv_bytes(config: AppConfig, text_dir: Path) -> int:
    """What the configured blocks take, and a little more: else vLLM reserves nearly all of a CPU's memory."""
    raw = json.loads((text_dir / "config.json").read_text(encoding="utf-8"))
    shape = read_shape(raw, _DTYPE_BYTES[config.model.dtype])
    tokens = config.engine.kv_num_blocks * config.engine.kv_block_size
    return int(shape.kv_bytes(1) * tokens * _KV_SLACK)


def _description(config: AppConfig, model: str, version: str) -> dict[str, Any]:
    speculation, vllm = config.speculation, config.vllm
    drafter = speculation.drafter
    where = drafter.path or drafter.hub_id or "no checkpoint of its own"
    return {
        "target": f"{config.model.id} ({model}), {config.model.dtype}, vLLM {version}",
        "devices": f"{vllm.world_size} ({vllm.device}): tensor {vllm.tensor_parallel_size}, pipeline "
        f"{vllm.pipeline_parallel_size}, data {vllm.data_parallel_size}, by {vllm.executor}",
        "drafter": "none" if drafter.kind == "none" else f"{drafter.kind}, {where}",
        "mode": f"{speculation.mode.value}{', by vLLM' if is_adaptive(config) else ''}",
    }
