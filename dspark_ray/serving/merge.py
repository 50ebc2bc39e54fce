"""Several asynchronous generators as one, items in order of arrival."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yields from all `sources`; the first exception of any ends them all and is raised.

    Closing it closes every source before `aclose` returns. A single source needs no tasks.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield item
        return
    arrivals: asyncio.Queue[tuple[T] | BaseException | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(source, arrivals)) for source in sources]
    try:
        running = len(tasks)
        while running:
            arrival = await arrivals.get()
            if isinstance(arrival, BaseException):
                raise arrival
            if arrival is None:
                running -= 1
            else:
                yield arrival[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    source: AsyncGenerator[T, None], arrivals: "asyncio.Queue[tuple[T] | BaseException | None]"
) -> None:
    try:
        async with aclosing(source):
            async for item in source:
                arrivals.put_nowait((item,))
        arrivals.put_nowait(None)
    except BaseException as error:  # a cancellation inside the source too: the reader must not wait for more
        arrivals.put_nowait(error)
        if not isinstance(error, Exception):
            raise
