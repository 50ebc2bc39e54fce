"""A ring of messages in shared memory: one writer, some readers, every message for all of them.

ring = Ring.create(num_readers=2, capacity=1 << 20)  # rank 0
reader = Ring.attach(ring.name).reader(0)  # another process of the same machine
ring.write(b"...", timeout_s=60.0)
reader.read(timeout_s=None)

A record is written first and published by the position behind it. It also carries its own position and a
checksum: a reader that sees it torn (no order of stores is promised between processors) looks again. The
writer waits for the slowest reader before it overwrites anything.
"""

import contextlib
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory

from dspark_ray.core.errors import RankError
from dspark_ray.models.parallel.channel import Progress

_MAGIC = 0x647370_6B72_6E67  # says that this is a ring
_RECORD = struct.Struct("<QII")  # its position plus one (memory begins as zeros), length, checksum
_SKIP = 0xFFFF_FFFF  # a length: the next record is at the beginning
_ALIGNMENT = _RECORD.size
# Words of 8 bytes. A reader's lie in a cache line of their own.
_LINE = 8
_MAGIC_AT, _CAPACITY_AT, _READERS_AT, _WRITTEN_AT = 0, 1, 2, 8
_READ, _TAKEN, _DONE, _SUMS, _BEAT_NS, _PID = range(6)
_YIELDS = 200  # before a waiting process sleeps
_ATTACHING = threading.Lock()
_NAP_S, _LONG_NAP_S, _NAPS = 1e-4, 1e-3, 10_000


class RingFullError(RankError):
    """Some reader has not read for too long."""


class Ring:
    """One side's view of the shared memory."""

    def __init__(self, memory: SharedMemory, capacity: int, num_readers: int) -> None:
        self._memory, self.capacity, self.num_readers = memory, capacity, num_readers
        start = _header_bytes(num_readers)
        self._words = _bytes_of(memory)[:start].cast("Q")
        self._data = _bytes_of(memory)[start : start + capacity]
        self._is_owner = False

    @classmethod
    def create(cls, num_readers: int, capacity: int) -> "Ring":
        """An empty ring for records of up to half its `capacity`, in bytes. `RankError` without room."""
        capacity += -capacity % _ALIGNMENT
        memory = _allocate(_header_bytes(num_readers) + capacity)
        ring = cls(memory, capacity, num_readers)
        ring._is_owner = True
        for place, value in ((_CAPACITY_AT, capacity), (_READERS_AT, num_readers), (_MAGIC_AT, _MAGIC)):
            ring._words[place] = value
        return ring

    @classmethod
    def attach(cls, name: str) -> "Ring":
        """A ring that another process has made. `RankError` if there is none."""
        try:
            with _without_cleaning_up():
                memory = SharedMemory(name)
        except OSError as error:
            raise RankError(f"the shared memory {name} cannot be opened: {error}") from error
        words = _bytes_of(memory)[: 8 * _LINE].cast("Q")
        magic, capacity, num_readers = words[_MAGIC_AT], words[_CAPACITY_AT], words[_READERS_AT]
        words.release()
        if magic != _MAGIC:
            memory.close()
            raise RankError(f"the shared memory {name} holds no ring")
        return cls(memory, capacity, num_readers)

    @property
    def name(self) -> str:
        return self._memory.name

    def reader(self, index: int) -> "RingReader":
        """Reader `index`'s end, which is this process's from now on."""
        assert 0 <= index < self.num_readers
        return RingReader(self, index)

    def write(self, payload: bytes, timeout_s: float) -> None:
        """One message to all readers. `RingFullError` when one of them leaves no room for so long."""
        size = _RECORD.size + len(payload) + -len(payload) % _ALIGNMENT
        if 2 * size > self.capacity:
            raise RankError(f"a message of {len(payload)} bytes is too long for a ring of {self.capacity}")
        position = self._words[_WRITTEN_AT]
        left = self.capacity - position % self.capacity
        skipped = left if left < size else 0
        self._wait_for_room(position + skipped + size, timeout_s)
        if skipped:
            self._put(position, _SKIP, b"")
        self._put(position + skipped, len(payload), payload)
        self._words[_WRITTEN_AT] = position + skipped + size

    def progress(self, index: int) -> Progress:
        """What reader `index` has noted."""
        first = _reader_at(index)
        _, taken, done, sums, beat_ns, pid, *_ = self._words[first : first + _LINE].tolist()
        silent_s = (time.monotonic_ns() - beat_ns) / 1e9 if beat_ns else None
        return Progress(taken, done, sums, silent_s, has_ended=pid != 0 and not _is_running(pid))

    def unlink(self) -> None:
        """Takes the name away: those who are attached stay so, and nothing is left when they are gone."""
        if self._is_owner:
            self._is_owner = False
            with contextlib.suppress(FileNotFoundError):
                self._memory.unlink()

    def close(self) -> None:
        self.unlink()
        self._words.release()
        self._data.release()
        self._memory.close()

    def _put(self, position: int, length: int, payload: bytes) -> None:
        at = position % self.capacity
        self._data[at + _RECORD.size : at + _RECORD.size + len(payload)] = payload
        _RECORD.pack_into(self._data, at, position + 1, length, _checksum(position, length, payload))

    def _wait_for_room(self, end: int, timeout_s: float) -> None:
        """Until every reader is past what a record up to position `end` overwrites."""

        def has_room() -> bool:
            slowest = min(self._words[_reader_at(index) + _READ] for index in range(self.num_readers))
            return end - slowest <= self.capacity

        if not _wait(has_room, timeout_s):
            raise RingFullError(f"no room in the ring for {timeout_s:g} s")


class RingReader:
    """`RankReceiver`: one reader's end, with what it tells the writer of itself."""

    def __init__(self, ring: Ring, index: int) -> None:
        self._ring, self._first = ring, _reader_at(index)
        self._words = ring._words
        self._words[self._first + _PID] = os.getpid()

    def receive(self) -> bytearray:
        return self.read(None)

    def read(self, timeout_s: float | None) -> bytearray:
        """The next message, waiting for it (None: without end). `RankError` when there is none in time, or
        only a torn one."""
        ring, record = self._ring, self._record
        position = self._words[self._first + _READ]
        found: list[bytearray | None] = []

        def is_there() -> bool:
            if ring._words[_WRITTEN_AT] == position:
                return False
            complete, payload = record(position)
            if complete:
                found.append(payload)
            return complete

        if not _wait(is_there, timeout_s):
            torn = ring._words[_WRITTEN_AT] != position
            raise RankError(f"{'only a torn' if torn else 'no'} message in {timeout_s or 0:g} s")
        payload = found[0]
        if payload is None:  # the rest of the ring was too short
            self._words[self._first + _READ] = position + ring.capacity - position % ring.capacity
            return self.read(timeout_s)
        size = _RECORD.size + len(payload) + -len(payload) % _ALIGNMENT
        self._words[self._first + _READ] = position + size
        return payload

    def note(self, taken: int, done: int) -> None:
        """How far this rank is, in messages."""
        self._words[self._first + _TAKEN], self._words[self._first + _DONE] = taken, done

    def note_sums(self, number: int) -> None:
        """How many operations it has begun together with the others."""
        self._words[self._first + _SUMS] = number

    def beat(self) -> None:
        """It lives. May be called from another thread."""
        self._words[self._first + _BEAT_NS] = time.monotonic_ns()

    def close(self) -> None:
        self._ring.close()

    def _record(self, position: int) -> tuple[bool, bytearray | None]:
        """(whether it is complete, its payload or None for a skip)."""
        at = position % self._ring.capacity
        own, length, checksum = _RECORD.unpack_from(self._ring._data, at)
        start = at + _RECORD.size
        if own != position + 1 or (length != _SKIP and start + length > self._ring.capacity):
            return False, None
        payload = bytearray() if length == _SKIP else bytearray(self._ring._data[start : start + length])
        if checksum != _checksum(position, length, payload):
            return False, None
        return True, None if length == _SKIP else payload


def _wait(condition: Callable[[], bool], timeout_s: float | None) -> bool:
    """Until it holds: yielding first, since a step takes milliseconds, then in longer and longer naps."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    tries = 0
    while not condition():
        if deadline is not None and time.monotonic() > deadline:
            return False
        tries += 1
        time.sleep(0.0 if tries < _YIELDS else _NAP_S if tries < _NAPS else _LONG_NAP_S)
    return True


def _allocate(size: int) -> SharedMemory:
    """Really there: memory that turns out to be missing when it is written to ends the process."""
    try:
        memory = SharedMemory(create=True, size=size)
        try:
            os.posix_fallocate(memory._fd, 0, size)  # type: ignore[attr-defined]
        except OSError:
            memory.close()
            memory.unlink()
            raise
    except OSError as error:
        raise RankError(
            f"no room for {size} bytes of shared memory: {error.strerror}; containers get more by --shm-size"
        ) from error
    return memory


@contextlib.contextmanager
def _without_cleaning_up() -> Iterator[None]:
    """Before Python 3.13 a process unlinks at its end whatever it has attached to, which is the owner's."""
    with _ATTACHING:
        register = resource_tracker.register
        resource_tracker.register = lambda name, rtype: None
        try:
            yield
        finally:
            resource_tracker.register = register


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's, and so not the reader
        return False
    return True


def _checksum(position: int, length: int, payload: bytes | bytearray) -> int:
    return zlib.crc32(payload, (position + length) & 0xFFFF_FFFF)


def _bytes_of(memory: SharedMemory) -> "memoryview[int]":
    assert memory.buf is not None, "it has been closed"
    return memory.buf


def _header_bytes(num_readers: int) -> int:
    return 8 * _LINE * (2 + num_readers)


def _reader_at(index: int) -> int:
    """The first of a reader's words."""
    return _LINE * (2 + index)
