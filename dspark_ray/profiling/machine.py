"""Where and with what a figure was measured; every result file carries it."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

from dspark_ray.core.config import AppConfig
from dspark_ray.profiling.identity import hardware_name, kernels_digest

_PACKAGES = ("dspark-ray", "torch", "transformers", "ray", "numpy")


def machine_facts() -> dict[str, Any]:
    """Hardware, threads and versions as plain values; nothing that names a person or a path."""
    return {
        "hardware": hardware_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "kernels": kernels_digest(),
        **{package: _version(package) for package in _PACKAGES},
    }


def portable_config(config: AppConfig) -> dict[str, Any]:
    """A configuration for a result file: absolute paths by their last part, since they are this machine's."""
    values = config.model_dump(mode="json")
    speculation = values["speculation"]
    places = [(values["model"], "source"), (speculation["drafter"], "path")]
    places += [(speculation, "temperatures"), (speculation, "step_table")]
    places += [(values["observability"], "record_path")]
    for section, key in places:
        if section[key] is not None and Path(section[key]).is_absolute():
            section[key] = Path(section[key]).name
    return values


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
