"""The ingress' end of the token path: one socket per process, one queue per attempt.

Everything here belongs to the event loop that called `start`.
"""

import asyncio
import logging
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from dspark_ray.core.clock import Clock, SystemClock
from dspark_ray.core.errors import DsparkError, EngineDeadError
from dspark_ray.core.types import RequestOutput
from dspark_ray.runtime.messages import Abort, Message, MessageError, Tokens, decode
from dspark_ray.runtime.transport import Inbox, Outboxes

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Attempt:
    """What is known of one attempt's sender."""

    items: "asyncio.Queue[RequestOutput | DsparkError | None]" = field(default_factory=asyncio.Queue)
    generation: int | None = None
    engine_address: str = ""
    num_received: int = 0  # tokens


class TokenStream:
    """Demultiplexes token messages to their requests (`dspark_ray.serving.generation.Streams`)."""

    def __init__(self, context: zmq.Context, inbox: Inbox, clock: Clock | None = None) -> None:
        """Takes `inbox` over."""
        self.address = inbox.address
        self._inbox = zmq.asyncio.Socket.from_socket(inbox.socket)
        self._outboxes = Outboxes(context, clock or SystemClock())
        self._attempts: dict[str, _Attempt] = {}
        self._reader: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to read, in the running event loop."""
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def close(self) -> None:
        """Nothing arrives any more; open queues stay silent."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._inbox.close()
        self._outboxes.close()

    def open(self, request_id: str) -> "asyncio.Queue[RequestOutput | DsparkError | None]":
        """A queue that gets the outputs of `request_id`, from now until `discard`."""
        assert request_id not in self._attempts, f"attempt {request_id!r} is open"
        self._attempts[request_id] = _Attempt()
        return self._attempts[request_id].items

    def discard(self, request_id: str) -> None:
        """Nobody wants its tokens any more; later ones are dropped."""
        self._attempts.pop(request_id, None)

    def abort(self, request_id: str) -> None:
        """Asks the engine that sends this attempt's tokens to end it. Nothing was sent yet: nothing to do."""
        attempt = self._attempts.get(request_id)
        if attempt is not None and attempt.engine_address:
            self._outboxes.send(attempt.engine_address, Abort(request_id))

    @property
    def num_open(self) -> int:
        return len(self._attempts)

    async def _read(self) -> None:
        while True:
            packet = await self._inbox.recv()
            try:
                self._dispatch(decode(packet))
            except MessageError as error:
                logger.warning("dropped a packet: %s", error)
            self._outboxes.flush()
            self._outboxes.drop_dead()

    def _dispatch(self, message: Message) -> None:
        if not isinstance(message, Tokens):
            logger.warning("dropped a %s message: it is not for an ingress", type(message).__name__)
            return
        for emission in message.emissions:
            attempt = self._attempts.get(emission.output.request_id)
            if attempt is None or attempt.generation not in (None, message.generation):
                continue  # nobody waits for it, or it comes from a stale owner
            attempt.generation, attempt.engine_address = message.generation, message.inbox_address
            if emission.offset != attempt.num_received:
                gap = f"{attempt.num_received} arrived, the next is number {emission.offset}"
                attempt.items.put_nowait(EngineDeadError(f"tokens were lost on the way: {gap}"))
                continue
            attempt.num_received += len(emission.output.token_ids)
            attempt.items.put_nowait(emission.output)
