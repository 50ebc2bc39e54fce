"""What ranks do together: add up, compare, gather. One group, one operation at a time, in the same order on
every rank.

group = join_group(store, rank=1, count=3, host="10.0.0.7", timeout_s=60.0)
group.sum(partial)  # in place, the same bits on every rank
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dspark_ray.core.errors import RankError


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

    def __init__(self, backend: Any, timeout_s: float) -> None:
        """`backend`: of this group alone, such as `dist.ProcessGroupGloo` (its type hints are incomplete).
        `timeout_s`: longest wait for the others in one operation."""
        self._backend = backend
        self.rank, self.count = backend.rank(), backend.size()
        self.on_enter: Callable[[int], None] = lambda number: None  # told of each operation it begins
        self._num_entered = 0
        self._sum, self._max, self._gather = dist.AllreduceOptions(), dist.AllreduceOptions(), _to_first()
        self._max.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self.set_timeout(timeout_s)

    @property
    def keeps_order(self) -> bool:
        """Two numbers add up to the same in either order. More are added in an order that depends on their
        place: a ring sums each segment from another rank on."""
        return self.count <= 2

    def set_timeout(self, timeout_s: float) -> None:
        for options in (self._sum, self._max, self._gather):
            options.timeout = timedelta(seconds=timeout_s)

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
        self._backend.abort()

    def _enter(self) -> Any:
        self._num_entered += 1
        self.on_enter(self._num_entered)
        return self._backend

    @staticmethod
    def _finish(work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise RankError(f"ranks cannot reach each other: {error}") from error


def highest_failed(group: Collective, failed: bool = False) -> int | None:
    """Whether any rank, this one perhaps, could not do what all had to: the highest such, or None. Every rank
    asks at the same time."""
    highest = int(group.max(torch.tensor([group.rank if failed else -1]))[0])
    return None if highest < 0 else highest


def join_group(store: dist.Store, *, rank: int, count: int, host: str, timeout_s: float) -> Group:
    """Meets the other ranks at `store`, within `timeout_s`. `host` is this rank's address."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    # Not by the machine's name, which need not resolve to the address that the others reach.
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    try:
        return Group(gloo(store, rank, count, options), timeout_s)
    except RuntimeError as error:
        raise RankError(f"rank {rank} of {count} cannot join the others: {error}") from error


def _to_first() -> dist.GatherOptions:
    options = dist.GatherOptions()
    options.rootRank = 0
    return options
