"""The ring of messages in shared memory: order, wrap-around, torn records, slow readers, processes."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from dspark_ray.core.errors import RankError
from dspark_ray.models.parallel import ring as ring_module
from dspark_ray.models.parallel.ring import Ring, RingFullError, RingReader

NOW = 0.02  # seconds: what is not there by then does not come


@pytest.fixture
def ring() -> Iterator[Ring]:
    """For two readers; records of up to 112 bytes."""
    made = Ring.create(num_readers=2, capacity=256)
    yield made
    made.close()


@pytest.fixture
def readers(ring: Ring) -> Iterator[list[RingReader]]:
    attached = [Ring.attach(ring.name).reader(index) for index in range(2)]
    yield attached
    for reader in attached:
        reader.close()


def test_every_reader_gets_every_message_in_order(ring: Ring, readers: list[RingReader]) -> None:
    """Of all lengths, over the end of the ring many times."""
    for length in [*range(113), *range(112, -1, -1), 0, 1, 111, 112] * 3:
        payload = bytes((length + i) % 251 for i in range(length))
        ring.write(payload, NOW)
        for reader in readers:
            assert reader.read(NOW) == payload


def test_messages_wait_for_their_readers(ring: Ring, readers: list[RingReader]) -> None:
    for number in range(5):
        ring.write(bytes([number]), NOW)
    for reader in readers:
        assert [reader.read(NOW)[0] for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(RankError, match="no message in"):
        readers[0].read(NOW)


def test_a_slow_reader_holds_the_writer_up(ring: Ring, readers: list[RingReader]) -> None:
    sent = 256 // 64  # records of 64 bytes
    for number in range(sent):
        ring.write(bytes([number]) * 40, NOW)
        readers[0].read(NOW)
    with pytest.raises(RingFullError, match="no room"):
        ring.write(b"one too many", NOW)
    assert [readers[1].read(NOW)[0] for _ in range(sent)] == list(range(sent))  # nothing was overwritten
    ring.write(b"again", NOW)
    assert readers[1].read(NOW) == b"again"


def test_the_writer_goes_on_as_soon_as_there_is_room(ring: Ring, readers: list[RingReader]) -> None:
    count, seen = 400, [[], []]  # type: ignore[var-annotated]

    def follow(index: int) -> None:
        for _ in range(count):
            seen[index].append(readers[index].read(10.0))

    threads = [threading.Thread(target=follow, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    sent = [number.to_bytes(2, "little") * (number % 50) for number in range(count)]
    for payload in sent:
        ring.write(payload, 10.0)
    for thread in threads:
        thread.join()
    assert seen == [sent, sent]


def test_a_torn_record_is_not_taken(ring: Ring, readers: list[RingReader]) -> None:
    """Published before all of its bytes can be seen: whichever are missing, the reader waits for them."""
    payload = bytes(range(1, 60))
    ring.write(payload, NOW)
    written = bytes(ring._data[:80])
    for missing in range(75):  # the record's own words, and its content
        ring._data[missing] = written[missing] ^ 0xFF
        with pytest.raises(RankError, match="only a torn message"):
            readers[0].read(0.0)
        ring._data[missing] = written[missing]
    assert readers[0].read(NOW) == payload


def test_nothing_is_read_from_memory_that_was_never_written(ring: Ring, readers: list[RingReader]) -> None:
    ring._words[ring_module._WRITTEN_AT] = 16  # published, and none of its bytes has come
    with pytest.raises(RankError, match="only a torn message"):
        readers[0].read(NOW)


def test_a_torn_record_is_taken_once_it_is_whole(ring: Ring, readers: list[RingReader]) -> None:
    ring.write(b"payload", NOW)
    right = ring._data[16]
    ring._data[16] = right ^ 1
    timer = threading.Timer(0.05, lambda: ring._data.__setitem__(16, right))
    timer.start()
    assert readers[0].read(10.0) == b"payload"
    timer.join()


def test_a_message_that_is_too_long_is_refused(ring: Ring) -> None:
    with pytest.raises(RankError, match="113 bytes is too long"):
        ring.write(bytes(113), NOW)


def test_readers_say_how_far_they_are(ring: Ring, readers: list[RingReader]) -> None:
    assert ring.progress(0).silent_s is None
    readers[0].note(taken=7, done=6)
    readers[0].note_sums(31)
    readers[0].beat()
    progress = ring.progress(0)
    assert (progress.taken, progress.done, progress.sums, progress.has_ended) == (7, 6, 31, False)
    assert progress.silent_s is not None
    assert progress.silent_s < 5.0
    assert ring.progress(1).taken == 0


def test_a_reader_whose_process_has_ended_is_seen(ring: Ring, readers: list[RingReader]) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    ring._words[ring_module._reader_at(1) + ring_module._PID] = child
    assert ring.progress(1).has_ended
    assert not ring.progress(0).has_ended


ECHO = """
import sys
from dspark_ray.models.parallel.ring import Ring
reader = Ring.attach(sys.argv[1]).reader(1)
for _ in range(60):
    print(reader.read(20.0).hex(), flush=True)
reader.close()
"""


def test_another_process_reads_and_leaves_the_ring_alone(ring: Ring, readers: list[RingReader]) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", ECHO, ring.name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    sent = [bytes([number]) * (number + 1) for number in range(60)]
    for payload in sent:
        ring.write(payload, 20.0)
        assert readers[0].read(NOW) == payload
    told, complaints = child.communicate(timeout=20.0)
    assert told.split() == [payload.hex() for payload in sent]
    assert complaints == ""
    assert ring.progress(1).has_ended
    Ring.attach(ring.name).close()  # its name is still there


def test_a_machine_without_room_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = set(Path("/dev/shm").iterdir())
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(RankError, match=r"no room for \d+ bytes of shared memory: No space .* --shm-size"):
        Ring.create(num_readers=1, capacity=1024)
    assert set(Path("/dev/shm").iterdir()) <= before


def test_what_is_no_ring_is_not_attached_to(ring: Ring) -> None:
    memory = SharedMemory(create=True, size=4096)
    try:
        with pytest.raises(RankError, match="holds no ring"):
            Ring.attach(memory.name)
    finally:
        memory.close()
        memory.unlink()
    with pytest.raises(RankError, match="cannot be opened"):
        Ring.attach("dspark-no-such-ring")


def test_an_unlinked_ring_still_works_and_leaves_nothing(ring: Ring, readers: list[RingReader]) -> None:
    ring.unlink()
    ring.write(b"on", NOW)
    assert readers[1].read(NOW) == b"on"
    with pytest.raises(RankError, match="cannot be opened"):
        Ring.attach(ring.name)
