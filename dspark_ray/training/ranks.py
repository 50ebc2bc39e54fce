"""The processes that train one drafter together: who is the first, and what they say to each other.

torchrun --nproc-per-node 2 -m dspark_ray.training.trainer CONFIG.yaml

Every process draws the same random numbers and takes its share of each step's sequences, so that a run's
course does not depend on how many there are. Only the first one writes.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Others wait while the first process runs the target over hours of new data.
PATIENCE = timedelta(hours=24)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among `count`."""

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def sum_gradients(self, parameters: Iterable[nn.Parameter], more: Tensor) -> Tensor:
        """Adds up the gradients of all processes, in place, and `more` [N] in the same message."""
        if self.count == 1:
            return more
        parameters = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([*(p.grad.flatten() for p in parameters if p.grad is not None), more])
        dist.all_reduce(flat)
        sizes = [p.numel() for p in parameters]
        *gradients, more = flat.split([*sizes, len(more)])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.view_as(parameter)
        return more

    def agree(self, flags: Sequence[bool]) -> list[bool]:
        """The first process's decisions, which depend on its clock and its signals."""
        if self.count == 1:
            return list(flags)
        decided = torch.tensor(flags, dtype=torch.int8)
        dist.broadcast(decided, src=0)
        return [bool(flag) for flag in decided.tolist()]

    def wait(self) -> None:
        """Until all are here."""
        if self.count > 1:
            dist.barrier()

    def leave(self) -> None:
        """Ends the group, once all are here. A process that just ended would leave threads of the group
        behind that others still talk to, which kills it."""
        if self.count > 1:
            dist.barrier()
            dist.destroy_process_group()


def join_ranks() -> Ranks:
    """The group that torchrun started this process in; alone without torchrun."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return Ranks()
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=PATIENCE)
    return Ranks(dist.get_rank(), count)
