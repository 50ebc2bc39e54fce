"""What ranks do together: add up, compare, gather. One group, one operation at a time, in the same order on
every rank.

group = join_group(store, rank=1, count=3, host="10.0.0.7", timeout_s=60.0)
group.sum(partial)  # in place, the same bits on every rank

On CPUs over gloo, which waits on the host and says who is gone. On GPUs over NCCL, whose operations wait on
the device, in the stream that computes: the host goes on, and a watch of its own ends a wait without end
(parallel/watch.py).
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dspark_ray.core.errors import ConfigError, RankError

CPU = torch.device("cpu")
_LAST_RESORT = 2.0  # × the longest wait


class Collective(Protocol):
    """The ranks of one decoder, as one of them sees them. Every call waits for all ranks and raises
    `RankError` for one that is gone or late."""

    @property
    def rank(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def keeps_order(self) -> bool:
        """Whether a sum's bits depend on its numbers alone, and not on where they stand in a tensor."""
        ...

    def sum(self, tensor: Tensor) -> Tensor:
        """Over all ranks, written into `tensor` on each."""
        ...

    def max(self, tensor: Tensor) -> Tensor:
        """The elementwise largest, written into `tensor` on each."""
        ...

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """On rank 0 everyone's tensor, of one shape, in the order of ranks; empty on the others."""
        ...


class Group:
    """`Collective` over a process group of torch."""

    def __init__(self, backend: Any, timeout_s: float, device: torch.device = CPU) -> None:
        """`backend`: of this group alone, such as `dist.ProcessGroupGloo` (its type hints are incomplete).
        `timeout_s`: longest wait for the others in one operation. `device`: of all tensors."""
        self._backend, self.device = backend, device
        self.rank, self.count = backend.rank(), backend.size()
        self.on_enter: Callable[[int], None] = lambda number: None  # told of each operation it begins
        self._num_entered = 0
        self._sum, self._max, self._gather = dist.AllreduceOptions(), dist.AllreduceOptions(), _to_first()
        self._max.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        for options in (self._sum, self._max, self._gather):
            # In the stream that computes, where a captured graph finds them.
            options.asyncOp = not self.waits_on_device
        self.set_timeout(timeout_s)

    @property
    def keeps_order(self) -> bool:
        """Two numbers add up to the same in either order. More are added in an order that depends on their
        place: a ring sums each segment from another rank on."""
        return self.count <= 2

    @property
    def waits_on_device(self) -> bool:
        """Whether an operation returns before the others have come."""
        return self.device.type != "cpu"

    def set_timeout(self, timeout_s: float) -> None:
        # Where the device waits, the backend only ends the process: later than who can say why.
        self.timeout_s = timeout_s
        longest = timeout_s * (_LAST_RESORT if self.waits_on_device else 1)
        for options in (self._sum, self._max, self._gather):
            options.timeout = timedelta(seconds=longest)

    def sum(self, tensor: Tensor) -> Tensor:
        self._finish(self._enter().allreduce([tensor], self._sum))
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        self._finish(self._enter().allreduce([tensor], self._max))
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.count)] if self.rank == 0 else []
        self._finish(self._enter().gather([parts] if parts else [], [tensor.contiguous()], self._gather))
        return parts

    def close(self) -> None:
        """Ends the connections: whoever waits for this rank is told at once."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.abort()
        del backend  # gloo's abort leaves connections open, which close with the last reference only

    def _enter(self) -> Any:
        if self._backend is None:
            raise RankError(f"rank {self.rank} has left the others")
        self._num_entered += 1
        self.on_enter(self._num_entered)
        return self._backend

    @staticmethod
    def _finish(work: dist.Work | None) -> None:
        if work is None:  # it is in the stream
            return
        try:
            work.wait()
        except RuntimeError as error:
            raise RankError(f"ranks cannot reach each other: {error}") from error


def highest_failed(group: "Group", failed: bool = False) -> int | None:
    """Whether any rank, this one perhaps, could not do what all had to: the highest such, or None. Every rank
    asks at the same time."""
    highest = int(group.max(torch.tensor([group.rank if failed else -1], device=group.device))[0])
    return None if highest < 0 else highest


def join_group(
    store: dist.Store,
    *,
    rank: int,
    count: int,
    host: str,
    timeout_s: float,
    device: torch.device = CPU,
) -> Group:
    """Meets the other ranks at `store`, within `timeout_s`. `host` is this rank's address, `device` where it
    computes. `ConfigError` for a GPU where torch has no NCCL."""
    try:
        if device.type == "cpu":
            backend = _gloo(store, rank, count, host, timeout_s)
        else:
            backend = _nccl(store, rank, count, timeout_s)
        return Group(backend, timeout_s, device)
    except RuntimeError as error:
        raise RankError(f"rank {rank} of {count} cannot join the others: {error}") from error


def _gloo(store: dist.Store, rank: int, count: int, host: str, timeout_s: float) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    # Not by the machine's name, which need not resolve to the address that the others reach.
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    return gloo(store, rank, count, options)


def _nccl(store: dist.Store, rank: int, count: int, timeout_s: float) -> Any:
    """Over the process's current device; NCCL finds the network's interfaces itself (NCCL_SOCKET_IFNAME)."""
    nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        raise ConfigError(
            f"several ranks on GPUs talk over NCCL, which torch {torch.__version__} has not: install a CUDA "
            "build, or set model.device: cpu"
        )
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return nccl(store, rank, count, options)


def _to_first() -> dist.GatherOptions:
    options = dist.GatherOptions()
    options.rootRank = 0
    return options
