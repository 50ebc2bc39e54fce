"""Engines that differ in their verification mode only: one target, one drafter, run one at a time.

The step table is a made-up steep one, so that `adaptive` trims and its budget changes; a clock that stands
still keeps live corrections out, so that a run can be repeated. For what is compared token by token or in
law, not in time.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dspark_ray.core.clock import ManualClock
from dspark_ray.core.config import AppConfig
from dspark_ray.core.types import VerificationMode
from dspark_ray.engine.build import DTYPES, build_drafter, eos_token_ids
from dspark_ray.engine.engine import Engine
from dspark_ray.models.targets.decoder import load_target
from dspark_ray.scheduling.step_table import StepTable

STEEP_TABLE = StepTable(rows=np.array([1, 1024]), verify_ms=np.array([21.0, 1044.0]))  # 20 ms and 1 ms a row


def build_modes(config: AppConfig, model_dir: Path, modes: Sequence[str], dtype: str) -> dict[str, Engine]:
    """By mode, in the order of `modes`; without a prefix cache, since they share the drafter's KV."""
    model = config.model.model_copy(update={"dtype": dtype})
    engine = config.engine.model_copy(update={"prefix_cache": False})
    target = load_target(model_dir, DTYPES[model.dtype], model.max_model_len)
    drafter = build_drafter(config.model_copy(update={"engine": engine}), target)
    engines = {}
    for mode in modes:
        speculation = config.speculation.model_copy(update={"mode": VerificationMode(mode)})
        own = config.model_copy(update={"model": model, "engine": engine, "speculation": speculation})
        used = None if mode == "off" else drafter
        eos = eos_token_ids(model_dir)
        engines[mode] = Engine(own, target, used, STEEP_TABLE, ManualClock(), eos_token_ids=eos)
    return engines
