"""zmq sockets as this program uses them: each process binds one inbox, others push to its address.

Addresses are of the form `tcp://ip:port` with a port the system chose, so nothing is configured and several
replicas share a machine. Sends never block: a peer that does not take its messages is a peer in trouble,
and a step loop must not wait for it.
"""

import logging
from collections import deque
from dataclasses import dataclass

import zmq

from dspark_ray.core.clock import Clock
from dspark_ray.runtime.messages import Message, MessageError, decode, encode

logger = logging.getLogger(__name__)

INBOX_MESSAGES = 10_000  # waiting in one socket, in either direction
MAX_MESSAGE_BYTES = 64 << 20
HEARTBEAT_MS = 5_000  # zmq's own thread sends and answers them: a long step does not miss one
STALLED_MS = 10_000.0  # a peer that took nothing for so long is given up
IDLE_MS = 600_000.0  # a socket unused for so long is closed; the next message opens it again


@dataclass(frozen=True, slots=True)
class Inbox:
    """A bound PULL socket and the address that others push to."""

    socket: zmq.Socket
    address: str


def bind_inbox(context: zmq.Context, ip: str, *, num_messages: int = INBOX_MESSAGES) -> Inbox:
    """An inbox on a free port of `ip`, with room for so many messages that have not been read."""
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, num_messages)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, ":" in ip)
    _set_heartbeat(socket)
    port = socket.bind_to_random_port(f"tcp://[{ip}]" if ":" in ip else f"tcp://{ip}")
    return Inbox(socket, f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}")


def connect(context: zmq.Context, address: str, *, num_messages: int) -> zmq.Socket:
    """A PUSH socket to an inbox, which keeps so many messages that are not on their way."""
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, num_messages)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.IPV6, "[" in address)
    # Queue only for a peer that is there: else the messages of a dead one would pile up unseen.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
    _set_heartbeat(socket)
    socket.connect(address)
    return socket


def _set_heartbeat(socket: zmq.Socket) -> None:
    """Notices a machine that is gone: without traffic, TCP alone would keep its connection for hours."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, 3 * HEARTBEAT_MS)


def receive_all(socket: zmq.Socket, limit: int = 1000) -> list[Message]:
    """Every message that has arrived, up to `limit`; packets that are none are logged and dropped."""
    messages: list[Message] = []
    while len(messages) < limit:
        try:
            packet = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            break
        try:
            messages.append(decode(packet))
        except MessageError as error:
            logger.warning("dropped a packet: %s", error)
    return messages


class Outbox:
    """One peer's address: keeps messages in order while the peer cannot take them."""

    def __init__(self, context: zmq.Context, address: str, clock: Clock) -> None:
        self._socket = connect(context, address, num_messages=INBOX_MESSAGES)
        self._clock = clock
        self._waiting: deque[bytes] = deque()
        self._stalled_since_ms: float | None = None
        self.last_used_ms = clock.now_ms()

    @property
    def is_waiting(self) -> bool:
        """Some messages have not been taken."""
        return bool(self._waiting)

    @property
    def stalled_ms(self) -> float:
        """How long the peer has taken nothing; 0 when nothing waits."""
        return 0.0 if self._stalled_since_ms is None else self._clock.now_ms() - self._stalled_since_ms

    def send(self, message: Message) -> None:
        """Sends now, or as soon as a later `send` or `flush` can."""
        self.last_used_ms = self._clock.now_ms()
        self._waiting.append(encode(message))
        self.flush()

    def flush(self) -> None:
        while self._waiting:
            try:
                self._socket.send(self._waiting[0], zmq.NOBLOCK)
            except zmq.Again:
                if self._stalled_since_ms is None:
                    self._stalled_since_ms = self._clock.now_ms()
                return
            self._waiting.popleft()
            self._stalled_since_ms = None

    def close(self) -> None:
        self._socket.close()


class Outboxes:
    """The outboxes of one thread, opened at the first message to an address."""

    def __init__(self, context: zmq.Context, clock: Clock) -> None:
        self._context = context
        self._clock = clock
        self._by_address: dict[str, Outbox] = {}

    @property
    def is_waiting(self) -> bool:
        """Some peer has not taken all of its messages: `flush` again soon."""
        return any(outbox.is_waiting for outbox in self._by_address.values())

    def send(self, address: str, message: Message) -> None:
        """Like `Outbox.send`; an address that is none is logged, its sender will time out."""
        outbox = self._by_address.get(address)
        if outbox is None:
            try:
                outbox = self._by_address[address] = Outbox(self._context, address, self._clock)
            except zmq.ZMQError as error:
                logger.warning("cannot send to %r: %s", address, error)
                return
        outbox.send(message)

    def flush(self) -> None:
        for outbox in self._by_address.values():
            outbox.flush()

    def drop_dead(self) -> list[str]:
        """Closes what nobody reads or uses any more; the addresses whose messages are lost by that."""
        now_ms = self._clock.now_ms()
        stalled = [a for a, outbox in self._by_address.items() if outbox.stalled_ms > STALLED_MS]
        idle = [a for a, outbox in self._by_address.items() if now_ms - outbox.last_used_ms > IDLE_MS]
        for address in {*stalled, *idle}:
            self._by_address.pop(address).close()
        return stalled

    def close(self) -> None:
        for outbox in self._by_address.values():
            outbox.close()
        self._by_address.clear()
