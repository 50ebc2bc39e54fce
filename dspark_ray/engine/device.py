"""Where the native engine computes."""

import logging
from typing import Literal

import torch

from dspark_ray.core.errors import ConfigError

logger = logging.getLogger(__name__)


def choose_device(wanted: Literal["auto", "cpu", "cuda"], rank: int = 0, sharing: int = 1) -> torch.device:
    """The device of `model.device`, and on a GPU the process's current one from now on. `ConfigError` for
    `cuda` where this process sees no GPU.

    `sharing`: ranks that see the same GPUs, each of which takes one of its own; this one is their `rank`.
    """
    seen = torch.cuda.is_available()
    if seen and wanted != "cpu" and (count := torch.cuda.device_count()) < sharing:
        if wanted == "cuda":
            raise ConfigError(
                f"{sharing} ranks need a GPU each, and this machine shows {count}: set "
                f"engine.tensor_parallel_size to at most {count}, or model.device: cpu"
            )
        logger.warning("%d ranks compute on CPUs: this machine shows %d GPUs", sharing, count)
        seen = False
    if wanted == "cuda" and not seen:
        raise ConfigError(
            "model.device is cuda, but this process sees no GPU: torch must be a CUDA build "
            f"(torch {torch.__version__} here), CUDA_VISIBLE_DEVICES must name one, and on a cluster the "
            "replica must reserve one; or set model.device: cpu"
        )
    if wanted == "cpu" or not seen:
        logger.info("device: cpu (model.device: %s)", wanted)
        return torch.device("cpu")
    device = torch.device("cuda", rank if sharing > 1 else torch.cuda.current_device())
    torch.cuda.set_device(device)  # Triton launches on the current one
    logger.info("device: %s, %s (model.device: %s)", device, torch.cuda.get_device_name(device), wanted)
    return device
