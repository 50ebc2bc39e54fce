"""Generators merged: everything arrives, errors end all, closing closes all."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from dspark_ray.serving.merge import merge


class Source:
    def __init__(self, items: list[int], error: Exception | None = None) -> None:
        self.items, self.error, self.closed = items, error, False

    async def run(self) -> AsyncGenerator[int, None]:
        try:
            for item in self.items:
                await asyncio.sleep(0)
                yield item
            if self.error:
                raise self.error
        finally:
            self.closed = True


@pytest.mark.parametrize("num_sources", [1, 2, 5])
async def test_every_item_arrives_in_its_sources_order(num_sources: int) -> None:
    sources = [Source([10 * k, 10 * k + 1, 10 * k + 2]) for k in range(num_sources)]
    items = [item async for item in merge([source.run() for source in sources])]
    for k in range(num_sources):
        assert [item for item in items if item // 10 == k] == sources[k].items


@pytest.mark.parametrize("num_sources", [1, 3])
async def test_an_error_ends_all(num_sources: int) -> None:
    sources = [Source([1], ValueError("x")), *(Source(list(range(1000))) for _ in range(num_sources - 1))]
    with pytest.raises(ValueError, match="x"):
        [item async for item in merge([source.run() for source in sources])]
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("num_sources", [1, 3])
async def test_closing_closes_all(num_sources: int) -> None:
    sources = [Source(list(range(1000))) for _ in range(num_sources)]
    async with aclosing(merge([source.run() for source in sources])) as merged:
        await anext(merged)
        await asyncio.sleep(0.001)
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("num_sources", [1, 3])
async def test_a_cancellation_in_a_source_is_not_waited_for(num_sources: int) -> None:
    cancelled: Any = asyncio.CancelledError()
    sources = [Source([1], cancelled), *(Source([]) for _ in range(num_sources - 1))]

    async def read() -> None:
        async for _ in merge([source.run() for source in sources]):
            pass

    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(read(), 1.0)
