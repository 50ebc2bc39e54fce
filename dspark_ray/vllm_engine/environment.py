"""What vLLM's CPU backend takes from environment variables; set before its processes start."""

import os
import sys
from pathlib import Path

from dspark_ray.core.config import AppConfig

_PRELOADED = ("libtcmalloc_minimal.so.4", "libiomp5.so")  # both matter much to speed: docs/vllm.md
_SYSTEM_LIBRARIES = ("lib", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "local/lib")


def cpu_environment(config: AppConfig, cores: list[int]) -> dict[str, str]:
    """Variables for an engine on `cores`; what the user has set stays."""
    # Unbound, vLLM keeps one core for itself: of two that is half.
    used = cores[: config.engine.num_threads or len(cores)]
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, used)),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if found := preloads():
        variables["LD_PRELOAD"] = ":".join(found)
    return {name: value for name, value in variables.items() if name not in os.environ}


def preloads() -> list[str]:
    """The allocator and the OpenMP runtime, where they are installed."""
    folders = [Path(sys.prefix) / "lib", *(Path("/usr") / name for name in _SYSTEM_LIBRARIES)]
    found = [[folder / name for folder in folders if (folder / name).is_file()] for name in _PRELOADED]
    return [str(paths[0]) for paths in found if paths]
