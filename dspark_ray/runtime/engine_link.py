"""The server's end of the path to its engine: submits requests and waits for their ends. No Ray.

Everything here belongs to the event loop that called `start`.
"""

import asyncio
import logging

import zmq
import zmq.asyncio

from dspark_ray.core.clock import Clock, SystemClock
from dspark_ray.core.errors import DsparkError, EngineDeadError
from dspark_ray.core.types import Request, RequestOutput
from dspark_ray.runtime.messages import Abort, Ends, Message, MessageError, Rejected, Stop, Submit, decode
from dspark_ray.runtime.transport import Inbox, Outboxes

logger = logging.getLogger(__name__)

FLUSH_PERIOD_S = 0.01  # between attempts to send what a busy engine has not taken yet


class EngineLink:
    """One engine as futures: `generate` resolves when the engine has ended the request."""

    def __init__(
        self,
        context: zmq.Context,
        inbox: Inbox,
        engine_address: str,
        generation: int,
        clock: Clock | None = None,
    ) -> None:
        """Takes `inbox` over. generation: of the engine, whose predecessors' messages are dropped"""
        self._address = inbox.address
        self._inbox = zmq.asyncio.Socket.from_socket(inbox.socket)
        self._outboxes = Outboxes(context, clock or SystemClock())
        self._engine_address = engine_address
        self._generation = generation
        self._waiting: dict[str, asyncio.Future[RequestOutput]] = {}
        self._dead: EngineDeadError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to read, in the running event loop."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._read()), loop.create_task(self._flush())]

    @property
    def num_waiting(self) -> int:
        """Requests that have not ended."""
        return len(self._waiting)

    async def generate(self, request: Request) -> RequestOutput:
        """The final output, without tokens. Cancelling it aborts the request in the engine.

        Raises `RequestError`, `QueueFullError`, or `EngineDeadError` once `fail` was called.
        """
        if self._dead is not None:
            raise self._dead
        assert request.request_id not in self._waiting, f"request id {request.request_id!r} is in use"
        end = self._waiting[request.request_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(Submit(request, self._address))
            return await end
        except asyncio.CancelledError:
            self._send(Abort(request.request_id))
            raise
        finally:
            self._waiting.pop(request.request_id, None)

    def abort(self, request_id: str) -> None:
        """Ends a request early: its `generate` returns with `FinishReason.ABORT`."""
        self._send(Abort(request_id))

    def stop(self) -> None:
        """Asks the engine to leave its loop."""
        self._send(Stop())

    def fail(self, error: EngineDeadError) -> None:
        """The engine is gone: every `generate` raises `error`, those that run and those to come."""
        self._dead = error
        for end in self._waiting.values():
            if not end.done():
                end.set_exception(error)

    async def close(self) -> None:
        self.fail(self._dead or EngineDeadError("this replica is shutting down"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._inbox.close()
        self._outboxes.close()

    def _send(self, message: Message) -> None:
        if self._dead is None:
            self._outboxes.send(self._engine_address, message)

    async def _read(self) -> None:
        while True:
            packet = await self._inbox.recv()
            try:
                self._dispatch(decode(packet))
            except MessageError as error:
                logger.warning("dropped a packet: %s", error)

    async def _flush(self) -> None:
        """A busy engine drains its inbox between steps: what did not fit is sent a little later."""
        while True:
            await asyncio.sleep(FLUSH_PERIOD_S if self._outboxes.is_waiting else 10 * FLUSH_PERIOD_S)
            self._outboxes.flush()

    def _dispatch(self, message: Message) -> None:
        if isinstance(message, Ends | Rejected) and message.generation != self._generation:
            return  # from a predecessor
        match message:
            case Ends(_, outputs):
                for output in outputs:
                    self._resolve(output.request_id, output)
            case Rejected():
                self._resolve(message.request_id, message.error())
            case _:
                logger.warning("dropped a %s message: it is not for a server", type(message).__name__)

    def _resolve(self, request_id: str, end: RequestOutput | DsparkError) -> None:
        future = self._waiting.get(request_id)
        if future is None or future.done():
            return  # its caller has left
        if isinstance(end, RequestOutput):
            future.set_result(end)
        else:
            future.set_exception(end)
