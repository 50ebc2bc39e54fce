"""Tensor-parallel ranks as threads of one process, over real gloo connections.

with ranks(3) as groups: ...  # a Group for each rank, all connected
results = on_every_rank(groups, lambda group: group.sum(torch.ones(4)))

with led(spec, ["a", "b"]) as ranks: tiny_engine(None, target=ranks.target)  # on two nodes: over zmq
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from dspark_ray.models.collective import Group, join_group
from dspark_ray.models.parallel.follower import Follower
from dspark_ray.models.parallel.journal import JournalEntry
from dspark_ray.models.parallel.leader import LeadingDecoder
from dspark_ray.runtime.rank_link import RankLink
from dspark_ray.runtime.ranks import FollowerEnd, LeaderEnd, TargetSpec

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


@dataclass(frozen=True, slots=True)
class Led:
    """A decoder and the ranks that follow it."""

    target: LeadingDecoder
    followers: list[Follower]

    def journals(self) -> list[tuple[JournalEntry, ...]]:
        """Rank 0's and the others', which are further back while they carry something out."""
        return [self.target.journal.entries(), *(follower.journal.entries() for follower in self.followers)]


def join_and_load(end: FollowerEnd, link: RankLink, spec: TargetSpec) -> Follower:
    end.join(link)
    return end.load(spec)


@contextmanager
def led(spec: TargetSpec, nodes: Sequence[str], *, step_timeout_s: float = 30.0) -> Iterator[Led]:
    """Rank i is on node `nodes[i]`. Followers end with it, and what one of them raised is raised."""
    ends = [FollowerEnd(rank, HOST, node) for rank, node in enumerate(nodes[1:], start=1)]
    places = [end.place for end in ends]
    leader = LeaderEnd.open(HOST, nodes[0], places, 1 << 18, step_timeout_s=step_timeout_s)
    with ThreadPoolExecutor(len(nodes)) as pool:
        loading = [pool.submit(join_and_load, end, leader.link, spec) for end in ends]
        target = leader.load(spec)
        followers = [future.result() for future in loading]
        running = [pool.submit(follower.run) for follower in followers]
        try:
            yield Led(target, followers)
            leader.close()
            for future in running:
                future.result(timeout=30.0)
        except BaseException:
            leader.close()
            raise
        finally:
            for end in ends:
                end.close()
