"""The ends of the token path in ingress and server, over in-process sockets."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
import zmq

from dspark_ray.core.errors import EngineDeadError, QueueFullError, RequestError
from dspark_ray.core.types import FinishReason, Request, RequestOutput, SamplingParams
from dspark_ray.runtime.engine_link import EngineLink
from dspark_ray.runtime.messages import Abort, Emission, Ends, Message, Rejected, Submit, Tokens, encode
from dspark_ray.runtime.token_stream import TokenStream
from dspark_ray.runtime.transport import Inbox, receive_all

GENERATION = 5
NUMBERS = itertools.count()


class Wire:
    """One end under test and the engine's socket at the other."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.engine = self._bind()
        self.inbox = self._bind()
        self.out = self.context.socket(zmq.PUSH)
        self.out.connect(self.inbox.address)

    def _bind(self) -> Inbox:
        socket = self.context.socket(zmq.PULL)
        address = f"inproc://link-{next(NUMBERS)}"
        socket.bind(address)
        return Inbox(socket, address)

    def send(self, message: Message) -> None:
        self.out.send(encode(message))

    async def at_engine(self) -> list[Any]:
        await asyncio.sleep(0.01)
        return receive_all(self.engine.socket)


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    wire = Wire()
    yield wire
    wire.context.destroy(linger=0)


@pytest.fixture
async def stream(wire: Wire) -> AsyncIterator[TokenStream]:
    stream = TokenStream(wire.context, wire.inbox)
    stream.start()
    yield stream
    await stream.close()


@pytest.fixture
async def link(wire: Wire) -> AsyncIterator[EngineLink]:
    link = EngineLink(wire.context, wire.inbox, wire.engine.address, GENERATION)
    link.start()
    yield link
    await link.close()


def tokens(wire: Wire, *emissions: tuple[str, int, tuple[int, ...]], generation: int = GENERATION) -> Tokens:
    outputs = tuple(Emission(offset, RequestOutput(name, ids)) for name, offset, ids in emissions)
    return Tokens(generation, wire.engine.address, outputs)


async def test_outputs_reach_the_queue_of_their_request(wire: Wire, stream: TokenStream) -> None:
    a, b = stream.open("a"), stream.open("b")
    wire.send(tokens(wire, ("a", 0, (1, 2)), ("b", 0, (3,)), ("unknown", 0, (9,))))
    wire.send(tokens(wire, ("a", 2, (4,))))
    assert [(await a.get()).token_ids, (await a.get()).token_ids] == [(1, 2), (4,)]  # type: ignore[union-attr]
    assert (await b.get()).token_ids == (3,)  # type: ignore[union-attr]
    stream.discard("a")
    stream.discard("b")
    assert stream.num_open == 0


async def test_a_gap_is_an_error_and_a_stale_owner_is_ignored(wire: Wire, stream: TokenStream) -> None:
    items = stream.open("a")
    wire.send(tokens(wire, ("a", 0, (1,))))
    wire.send(tokens(wire, ("a", 1, (8,)), generation=GENERATION - 1))
    wire.send(tokens(wire, ("a", 3, (2,))))
    assert isinstance(await items.get(), RequestOutput)
    assert isinstance(await items.get(), EngineDeadError)


async def test_an_abort_goes_to_the_engine_that_sends(wire: Wire, stream: TokenStream) -> None:
    items = stream.open("a")
    stream.abort("a")
    stream.abort("unknown")
    assert await wire.at_engine() == []
    wire.send(tokens(wire, ("a", 0, (1,))))
    await items.get()
    stream.abort("a")
    assert await wire.at_engine() == [Abort("a")]


async def test_stray_packets_do_not_stop_a_stream(wire: Wire, stream: TokenStream) -> None:
    items = stream.open("a")
    wire.out.send(b"junk")
    wire.send(Abort("a"))
    wire.send(tokens(wire, ("a", 0, (1,))))
    assert isinstance(await items.get(), RequestOutput)


def request(request_id: str) -> Request:
    return Request(request_id, (1, 2), SamplingParams())


async def test_a_request_is_submitted_and_its_end_returned(wire: Wire, link: EngineLink) -> None:
    call = asyncio.create_task(link.generate(request("a")))
    (submit,) = await wire.at_engine()
    assert isinstance(submit, Submit)
    assert (submit.request, submit.server_address) == (request("a"), wire.inbox.address)
    final = RequestOutput("a", (), FinishReason.LENGTH)
    wire.send(Ends(GENERATION - 1, (RequestOutput("a", (), FinishReason.ERROR),)))
    wire.send(Ends(GENERATION, (final,)))
    assert await call == final
    assert link.num_waiting == 0


async def test_refusals_are_raised(wire: Wire, link: EngineLink) -> None:
    calls = [asyncio.create_task(link.generate(request(name))) for name in ("a", "b")]
    await wire.at_engine()
    wire.send(Rejected(GENERATION, "a", "too long", False, "max_tokens", 400, "code"))
    wire.send(Rejected(GENERATION, "b", "full", queue_full=True))
    with pytest.raises(RequestError) as caught:
        await calls[0]
    assert (caught.value.param, caught.value.code) == ("max_tokens", "code")
    with pytest.raises(QueueFullError):
        await calls[1]


async def test_cancelling_aborts(wire: Wire, link: EngineLink) -> None:
    call = asyncio.create_task(link.generate(request("a")))
    await wire.at_engine()
    call.cancel()
    assert await wire.at_engine() == [Abort("a")]
    assert link.num_waiting == 0


async def test_a_dead_engine_fails_all_requests(wire: Wire, link: EngineLink) -> None:
    call = asyncio.create_task(link.generate(request("a")))
    await wire.at_engine()
    link.fail(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError, match="gone"):
        await call
    with pytest.raises(EngineDeadError, match="gone"):
        await link.generate(request("b"))


async def test_a_request_that_cannot_be_sent_leaves_nothing(wire: Wire, link: EngineLink) -> None:
    with pytest.raises(OverflowError):
        await link.generate(Request("a", (1 << 70,), SamplingParams()))
    assert link.num_waiting == 0
