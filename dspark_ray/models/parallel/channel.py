"""Both ends of the way from rank 0 to the others, whatever it is made of, and who holds it up."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

BEAT_S = 0.25  # between a follower's signs of life
SILENT_S = 2.0  # a process without any for so long is gone, or stopped


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a follower is, by its own word."""

    taken: int  # number of the message it took last
    done: int  # number of the message it carried out last
    sums: int  # operations that it has begun together with the others
    silent_s: float | None  # since its last sign of life; None: there was none yet
    has_ended: bool = False  # its process, where that can be seen


class RankSender(Protocol):
    """Rank 0's end."""

    def send(self, payload: bytes) -> None:
        """To every rank. Waits for ranks that are behind; `RankError` for one that stays so."""
        ...

    def progress(self) -> dict[int, Progress]:
        """By rank."""
        ...

    def close(self) -> None: ...


class RankReceiver(Protocol):
    """A follower's end."""

    def receive(self) -> bytearray:
        """The next message, waiting for it as long as it takes."""
        ...

    def note(self, taken: int, done: int) -> None: ...

    def note_sums(self, number: int) -> None: ...

    def beat(self) -> None:
        """A sign of life, from a thread of its own."""
        ...

    def close(self) -> None: ...


def blame(progress: Mapping[int, Progress], number: int, sums: int) -> str:
    """Which rank holds up message `number`, of whose operations rank 0 has begun `sums`."""
    if not progress:
        return "there is no other rank"
    rank = min(progress, key=lambda rank: (_state(progress[rank]), progress[rank].taken, progress[rank].sums))
    found = progress[rank]
    where = f"message {number}: it has taken {found.taken} and finished {found.done}"
    match _state(found):
        case 0:
            return f"rank {rank} has ended in {where}"
        case 1:
            return f"rank {rank} gave no sign of life for {found.silent_s or 0:.1f} s in {where}"
    if found.taken < number or found.sums < sums:
        return (
            f"rank {rank} is behind in {where}, and has begun sum {found.sums} where rank 0 waits in {sums}"
        )
    return f"no rank is behind in message {number}: all wait in sum {sums}"


def _state(progress: Progress) -> int:
    """0: ended; 1: silent; 2: alive."""
    if progress.has_ended:
        return 0
    return 1 if progress.silent_s is not None and progress.silent_s > SILENT_S else 2
