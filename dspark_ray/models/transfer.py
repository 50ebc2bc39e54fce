"""Between the host and a device without waiting, and the one way back that waits.

`to_host` is the only place where a step waits for its device; a test and the GPU check fail when anything
else does.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: Tensor, device: torch.device | None) -> Tensor:
    """A host tensor there, in the order of the device's work; the tensor itself for the CPU and for None.

    The host goes on at once. Pageable memory is staged by the driver, so `values` may be dropped.
    """
    if device is None or device.type == "cpu":
        return values
    return values.to(device, non_blocking=True)


def arrays_to_device(device: torch.device, *arrays: NDArray[np.generic]) -> list[Tensor]:
    """Arrays of 8-byte numbers in one copy, each with its own type."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    whole = to_device(torch.from_numpy(np.concatenate([array.view(np.int64) for array in arrays])), device)
    parts = whole.split([len(array) for array in arrays])
    return [
        part.view(torch.float64) if array.dtype == np.float64 else part
        for part, array in zip(parts, arrays, strict=True)
    ]


def to_host(values: Tensor) -> Tensor:
    """What the device has computed, waited for: the tensor itself where it is on the CPU."""
    if not values.is_cuda:
        return values.cpu()
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    pinned.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    copied.synchronize()
    return pinned


def all_to_host(*values: Tensor | None) -> list[Tensor | None]:
    """Several tensors in one copy: integers below 2^53 and floats. Those on the CPU are returned."""
    there = [value for value in values if value is not None and not value.is_cpu]
    if not there:
        return list(values)
    whole = to_host(torch.cat([value.reshape(-1).double() for value in there]))
    parts = iter(whole.split([value.numel() for value in there]))
    return [
        value if value is None or value.is_cpu else next(parts).view(value.shape).to(value.dtype)
        for value in values
    ]
