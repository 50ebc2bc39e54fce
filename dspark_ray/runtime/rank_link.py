"""How the ranks of one engine find each other. Read in processes without torch, too."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a follower is."""

    node: str
    host: str  # its address
    address: str  # of its zmq inbox
    device: str = "cpu"  # the kind that it computes on


@dataclass(frozen=True, slots=True)
class RankLink:
    """What a follower needs to know of the others."""

    places: tuple[RankPlace, ...]  # of ranks 1, 2, ...
    store: tuple[str, int]  # host and port, on rank 0
    ring_name: str | None
    readers: dict[int, int]  # rank → its place in the ring; the others are told over zmq
    acks_address: str
    step_timeout_s: float

    @property
    def count(self) -> int:
        """Ranks, the first included."""
        return len(self.places) + 1

    def describe(self) -> str:
        """For the start-up log."""
        return (
            f"{self.count}: {len(self.readers)} follow on this node, through shared memory, "
            f"{len(self.places) - len(self.readers)} on others, over zmq"
        )
