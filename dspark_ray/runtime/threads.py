"""How many threads a process of an engine computes with."""

import os

from dspark_ray.core.config import AppConfig


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_engine(config: AppConfig, num_cores: int) -> int:
    """The configured number, or an equal part of the cores: replicas and ranks often share a machine."""
    processes = config.serving.num_replicas * config.engine.tensor_parallel_size
    return config.engine.num_threads or max(1, num_cores // processes)


def use_threads(config: AppConfig) -> int:
    """Sets this process's number, before torch is imported or after; returns it."""
    num_threads = threads_per_engine(config, available_cores())
    # Ray sets this to the actor's CPUs; it counts when torch is imported, which is below.
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    import torch

    torch.set_num_threads(num_threads)
    return num_threads
