"""The way from rank 0 to the other ranks: one ring for those on its node, a zmq socket to each other one."""

import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import zmq

from dspark_ray.core.errors import RankError
from dspark_ray.models.parallel.channel import Progress
from dspark_ray.models.parallel.ring import Ring
from dspark_ray.runtime.transport import Inbox

WAITING_MESSAGES = 8  # that a rank on another node has not read, on either side
_LISTEN_MS = 200
_ACK = struct.Struct("<4Q")  # rank, taken, done, sums


@dataclass(frozen=True, slots=True)
class _Heard:
    """What a rank on another node said last."""

    taken: int = 0
    done: int = 0
    sums: int = 0
    at_s: float | None = None

    def progress(self) -> Progress:
        silent_s = None if self.at_s is None else time.monotonic() - self.at_s
        return Progress(self.taken, self.done, self.sums, silent_s)


class RankBroadcast:
    """`RankSender`: every message to all ranks, whatever node they are on."""

    def __init__(
        self,
        ring: Ring | None,
        readers: Mapping[int, int],
        wires: Mapping[int, zmq.Socket],
        acks: Inbox,
        timeout_s: float,
    ) -> None:
        """`readers`: rank → its place in the ring; `wires`: rank → a socket to its inbox."""
        self._ring, self._readers, self._wires, self._timeout_s = ring, readers, wires, timeout_s
        self._heard = {rank: _Heard() for rank in wires}
        self._closed = threading.Event()
        self._listener = threading.Thread(target=self._listen, args=(acks,), name="dspark-acks", daemon=True)
        self._listener.start()

    def all_are_here(self) -> None:
        """Nobody attaches any more: nothing of the ring outlives its processes."""
        if self._ring is not None:
            self._ring.unlink()

    def send(self, payload: bytes) -> None:
        if self._ring is not None:
            self._ring.write(payload, self._timeout_s)
        for rank, socket in self._wires.items():
            if not socket.poll(int(self._timeout_s * 1e3), zmq.POLLOUT):
                raise RankError(f"rank {rank} has taken no message for {self._timeout_s:g} s")
            socket.send(payload, zmq.NOBLOCK)

    def progress(self) -> dict[int, Progress]:
        found = {rank: heard.progress() for rank, heard in self._heard.items()}
        for rank, index in self._readers.items():
            assert self._ring is not None
            found[rank] = self._ring.progress(index)
        return found

    def close(self) -> None:
        self._closed.set()
        self._listener.join()
        if self._ring is not None:
            self._ring.close()
        for socket in self._wires.values():
            socket.close()

    def _listen(self, acks: Inbox) -> None:
        while not self._closed.is_set():
            if not acks.socket.poll(_LISTEN_MS):
                continue
            packet = acks.socket.recv()
            if len(packet) == _ACK.size:
                rank, taken, done, sums = _ACK.unpack(packet)
                if rank in self._heard:
                    self._heard[rank] = _Heard(taken, done, sums, time.monotonic())
        acks.socket.close()


class WireReceiver:
    """`RankReceiver` of a rank on another node than rank 0."""

    def __init__(self, rank: int, inbox: Inbox, acks: zmq.Socket) -> None:
        """`acks`: to rank 0; the beats' thread sends how far this rank is."""
        self._rank, self._inbox, self._acks = rank, inbox, acks
        self._taken = self._done = self._sums = 0

    def receive(self) -> bytearray:
        return bytearray(self._inbox.socket.recv())

    def note(self, taken: int, done: int) -> None:
        self._taken, self._done = taken, done

    def note_sums(self, number: int) -> None:
        self._sums = number

    def beat(self) -> None:
        if self._acks.poll(0, zmq.POLLOUT):
            self._acks.send(_ACK.pack(self._rank, self._taken, self._done, self._sums), zmq.NOBLOCK)

    def close(self) -> None:
        self._acks.close()
