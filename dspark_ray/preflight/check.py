"""All rules on one configuration.

report = check_config(load_app_config(path))
require_sound(config)  # before anything starts
"""

from dataclasses import dataclass, replace
from typing import Any

from dspark_ray.core.config import AppConfig
from dspark_ray.core.errors import ConfigError
from dspark_ray.models.shapes import read_shape
from dspark_ray.preflight.drafter import bundled_drafter, read_drafter
from dspark_ray.preflight.memory import MemoryPlan, plan_memory
from dspark_ray.preflight.problem import Problem
from dspark_ray.preflight.rules import NATIVE_TARGETS, RULES, Facts
from dspark_ray.preflight.sources import drafter_config, model_config, weight_bytes

_DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Report:
    """What was found, and what could not be looked at."""

    problems: tuple[Problem, ...]
    memory: MemoryPlan | None
    notes: tuple[str, ...]


def check_config(config: AppConfig) -> Report:
    """Judges a configuration without loading anything, from local files only. Raises `ConfigError` for a
    config.json that cannot be read."""
    if config.engine.kind == "timed":
        return Report((), None, ("the timed engine loads no model: nothing was checked",))
    facts, notes = _gather(config)
    problems = tuple(problem for rule in RULES for problem in rule(facts))
    return Report(problems, facts.memory, tuple(notes))


def require_sound(config: AppConfig) -> None:
    """Raises `ConfigError` with every problem found."""
    if problems := check_config(config).problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ConfigError(f"this configuration cannot work:\n{lines}")


def _gather(config: AppConfig) -> tuple[Facts, list[str]]:
    notes = []
    size = _DTYPE_BYTES[config.model.dtype]
    drafter = config.speculation.drafter
    raw_target, raw_drafter = model_config(config.model.source), drafter_config(drafter)
    target = None if raw_target is None else read_shape(_as_kept(raw_target, config), size)
    if target is not None and (stored := weight_bytes(config.model.source)):
        target = replace(target, weight_bytes=stored)
    if raw_target is None:
        notes.append(f"the shapes of {config.model.source} are not known here: its sizes were not checked")
    shape = None if raw_drafter is None else read_drafter(raw_drafter, size)
    if raw_target is not None and not drafter.has_checkpoint:
        shape = bundled_drafter(raw_target, drafter)
        if drafter.kind == "dspark" and shape is None:
            problem = "drafter.path is not set and the target's checkpoint holds no DSpark drafter"
            raise ConfigError(f"speculation.{problem}: name one, or a target that does")
    if drafter.has_checkpoint and shape is None:
        name = drafter.path or drafter.hub_id
        notes.append(f"the shapes of the drafter {name} are not known here: its fit was not checked")
    memory = None if target is None else plan_memory(config, target, shape)
    if memory is not None and memory.usable is None:
        notes.append("hardware.device_memory_gib is not set: whether all this fits was not checked")
    return Facts(config, target, shape, memory), notes


def _as_kept(raw: dict[str, Any], config: AppConfig) -> dict[str, Any]:
    """The native engine keeps every key, also of layers that only look back a window."""
    is_ours = config.engine.kind == "native" and raw.get("model_type") in NATIVE_TARGETS
    return {**raw, "sliding_window": None} if is_ours else raw
