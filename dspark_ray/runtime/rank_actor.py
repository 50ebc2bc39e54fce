"""A following rank's process: a named Ray actor in its replica's placement group.

Its server starts and owns it, and watches `run()`: a rank that ends, however it does, ends the replica.
"""

import os
from typing import TYPE_CHECKING, Any

import ray

from dspark_ray.core.config import AppConfig
from dspark_ray.runtime.logs import configure_logging
from dspark_ray.runtime.rank_link import RankLink, RankPlace
from dspark_ray.runtime.threads import use_threads

if TYPE_CHECKING:
    from dspark_ray.models.parallel.follower import Follower
    from dspark_ray.runtime.ranks import FollowerEnd

CONTROL = "control"
RANK_CONCURRENCY_GROUPS = {CONTROL: 1}


class RankActor:
    """`open()`, then `load()` while the others load, then `run()`, on the actor's own thread."""

    def __init__(self, config: AppConfig, rank: int) -> None:
        configure_logging()
        self._config, self._rank = config, rank
        self._end: FollowerEnd | None = None
        self._follower: Follower | None = None

    def open(self) -> RankPlace:
        """Where rank 0 finds this one."""
        use_threads(self._config)
        from dspark_ray.engine.device import choose_device
        from dspark_ray.runtime.ranks import FollowerEnd

        device = choose_device(self._config.model.device)  # what Ray has reserved for this actor
        self._end = FollowerEnd(self._rank, ray.util.get_node_ip_address(), node_id(), device)
        return self._end.place

    def load(self, link: RankLink) -> None:
        """Reads this rank's shard, fetching the model first if this node lacks it. Raises `DsparkError`."""
        assert self._end is not None, "open() comes first"
        from dspark_ray.models.fetch import resolve_model

        self._end.join(link)
        self._follower = self._end.load_for(self._config, resolve_model(self._config.model.source))

    def run(self) -> None:
        """Follows until rank 0 stops it; raises `RankError` when another rank is gone."""
        assert self._end is not None
        assert self._follower is not None, "load() comes first"
        try:
            self._follower.run()
        finally:
            self._end.close()

    @ray.method(concurrency_group=CONTROL)
    def journal(self) -> tuple[Any, ...]:
        """What it was told last, oldest first."""
        return () if self._follower is None else self._follower.journal.entries()

    @ray.method(concurrency_group=CONTROL)
    def pid(self) -> int:
        """For those who test what its death costs."""
        return os.getpid()


def node_id() -> str:
    """The node that this process is on."""
    return str(ray.get_runtime_context().get_node_id())
