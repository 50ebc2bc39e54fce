"""Between the host and a device without waiting, and the one way back that waits.

`HostCopy.wait` is the only place where a step waits for its device; a test and the GPU check fail when
anything else does.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: Tensor, device: torch.device | None) -> Tensor:
    """A host tensor there, in the order of the device's work; the tensor itself for the CPU and for None.

    The host goes on at once, and `values` may be dropped. NOTE: pinned first, since a copy of pageable memory
    may wait for all that the device has been told before.
    """
    if device is None or device.type == "cpu" or not values.is_cpu:
        return values
    if device.type == "cuda" and not values.is_pinned():
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def arrays_to_device(device: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    """Arrays of numbers in one copy, each with its own type and shape."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    parts, ends = [], [0]
    for array in arrays:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        pad = -len(flat) % 8  # each begins where numbers of 8 bytes may
        parts += [flat, np.zeros(pad, dtype=np.uint8)]
        ends.append(ends[-1] + len(flat) + pad)
    whole = to_device(torch.from_numpy(np.concatenate(parts)), device)
    found = []
    for array, start in zip(arrays, ends, strict=False):
        kind = torch.from_numpy(array[:0]).dtype
        part = (
            whole[start : start + array.nbytes].view(kind) if array.size else whole.new_empty(0, dtype=kind)
        )
        found.append(part.view(array.shape))
    return found


class HostCopy:
    """Values on their way to the host, behind all that the device was told before."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._copied = values, None
        if values.is_cuda:  # torch keeps pinned memory for the next ones: two such buffers take turns
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> Tensor:
        """The values, once they are here: the tensor itself where it was on the CPU."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.cpu()


def to_host(values: Tensor) -> Tensor:
    """What the device has computed, waited for: the tensor itself where it is on the CPU."""
    return HostCopy(values).wait()


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
