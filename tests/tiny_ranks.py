"""Tensor-parallel ranks as threads of one process, over real gloo connections.

with ranks(3) as groups: ...  # a Group for each rank, all connected
results = on_every_rank(groups, lambda group: group.sum(torch.ones(4)))
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from dspark_ray.models.collective import Group, join_group

HOST = "127.0.0.1"
Result = TypeVar("Result")


@contextmanager
def ranks(count: int, *, timeout_s: float = 30.0) -> Iterator[list[Group]]:
    """A group of `count` ranks."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=30))

    def join(rank: int) -> Group:
        return join_group(store, rank=rank, count=count, host=HOST, timeout_s=timeout_s)

    with ThreadPoolExecutor(count) as pool:
        groups = list(pool.map(join, range(count)))
        try:
            yield groups
        finally:
            for group in groups:
                group.close()


def on_every_rank(groups: Sequence[Group], work: Callable[[Group], Result]) -> list[Result]:
    """`work` of each rank at the same time; the first error is raised once all have ended."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(work, groups))
