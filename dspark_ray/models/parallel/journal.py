"""What a rank was last told, message by message: equal on all ranks, or something is badly wrong."""

from collections import deque
from dataclasses import dataclass

from dspark_ray.models.parallel.message import RankMessage, digest

KEPT = 256


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One message."""

    number: int
    kind: str
    digest: str  # of its bytes
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.number} {self.kind} {self.digest} {'×'.join(map(str, self.shape))}"


class Journal:
    """The last messages, oldest first. Written by one thread; others may read."""

    def __init__(self, kept: int = KEPT) -> None:
        self._entries: deque[JournalEntry] = deque(maxlen=kept)

    def note(self, message: RankMessage, payload: bytes | bytearray) -> None:
        self._entries.append(JournalEntry(message.number, message.kind, digest(payload), message.shape()))

    def entries(self) -> tuple[JournalEntry, ...]:
        return tuple(self._entries)

    def tail(self, count: int = 8) -> str:
        """The newest entries, for a log."""
        return "; ".join(map(str, self.entries()[-count:])) or "nothing"
