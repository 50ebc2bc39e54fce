"""More requests than there is room for, over the HTTP routes, against a real engine of toy size."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from dspark_ray.core.clock import ManualClock
from dspark_ray.engine.engine import Engine
from dspark_ray.models.tokenizer import Tokenizer
from dspark_ray.serving.api_keys import KeyRing, digest_of, parse_keys
from tests.local_app import LocalApp
from tests.tiny import TOKENIZER_VOCAB_SIZE, tiny_tokenizer_dir
from tests.tiny_engine import tiny_engine

KEYS = {"flex": "flex", "a": "default", "b": "default", "first": "priority"}  # name → tier
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(tiny_tokenizer_dir(tmp_path_factory.mktemp("tokenizer")))


class App(LocalApp):
    """Its keys are called what they are."""

    engine: Engine

    def __init__(self, tokenizer: Tokenizer, *, max_running: int, max_waiting: int, **serving: Any) -> None:
        self.engine = tiny_engine(
            None,
            vocab_size=TOKENIZER_VOCAB_SIZE,
            model={"id": "m"},
            engine={"max_running": max_running, "max_waiting": max_waiting},
            serving=serving,
        )
        lines = [
            json.dumps({"name": name, "sha256": digest_of(name), "tier": tier}) for name, tier in KEYS.items()
        ]
        ring = KeyRing(lambda: parse_keys(lines, "test"), None, ManualClock())
        super().__init__(tokenizer, self.engine, self.engine.config, keys=ring)

    def post(self, key: str, number: int = 0, **fields: Any) -> "asyncio.Task[httpx.Response]":
        body = {"model": "m", "prompt": f"prompt {number}", "max_tokens": NUM_TOKENS, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {key}"}
        post = self.client.post("/v1/completions", json={**body, **fields}, headers=headers)
        return asyncio.create_task(post)

    async def until(self, what: Any) -> None:
        """Turns the event loop until `what()`."""
        for _ in range(10_000):
            if what():
                return
            await asyncio.sleep(0.001)
        pytest.fail("it never came")


@pytest.fixture
async def apps() -> AsyncIterator[list[App]]:
    """Whatever was refused, nothing is left, and the counters add up."""
    apps: list[App] = []
    yield apps
    for app in apps:
        await app.settle()
        stats, counters = app.engine.stats(), app.engine.stats().counters
        assert (stats.num_running, stats.num_waiting, stats.kv_used_blocks) == (0, 0, 0)
        assert counters.drafted_tokens == counters.verified_tokens + counters.trimmed_tokens
        assert counters.verified_tokens == counters.accepted_tokens + counters.rejected_tokens


async def test_a_flood_is_refused_at_once_lowest_tiers_first(tokenizer: Tokenizer, apps: list[App]) -> None:
    app = App(tokenizer, max_running=2, max_waiting=8)
    apps.append(app)
    running = [app.post("flex", number, stream=True, max_tokens=90) for number in range(2)]
    await app.until(lambda: app.engine.stats().num_running == 2)
    sent = ["flex"] * 20 + ["a"] * 40 + ["b"] * 6 + ["first"] * 4
    answers = await asyncio.gather(*(app.post(key, number) for number, key in enumerate(sent)))
    told = Counter((key, answer.status_code) for key, answer in zip(sent, answers, strict=True))
    assert {status for _, status in told} == {200, 503}
    assert told["first", 200] == 4
    assert told["flex", 200] == 0
    # What is left of the queue is shared by the clients, though one sent seven times as much.
    assert told["a", 200] >= 2
    assert told["b", 200] >= 2
    for answer in answers:
        if answer.status_code == 503:
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "queue_full"
        else:
            assert answer.json()["usage"]["completion_tokens"] == NUM_TOKENS
    for stream in await asyncio.gather(*running):  # what has begun goes on, whatever its tier
        assert '"finish_reason":"length"' in stream.text.replace(" ", "")
    stats = app.engine.stats()
    num_refused = sum(count for (_, status), count in told.items() if status == 503)
    assert stats.num_refused == num_refused
    assert stats.num_finished == len(sent) + 2 - num_refused
    assert stats.num_aborted == 0


async def test_a_request_that_cannot_start_in_time_is_told_so(tokenizer: Tokenizer, apps: list[App]) -> None:
    app = App(tokenizer, max_running=1, max_waiting=8, start_within_s={"flex": 2.0})
    apps.append(app)
    clock = app.engine._clock
    assert isinstance(clock, ManualClock)
    running = app.post("a", stream=True, max_tokens=100)
    await app.until(lambda: app.engine.stats().num_running == 1)
    limited = [app.post("flex"), app.post("flex", start_within_s=9.0), app.post("b", start_within_s=1.0)]
    unlimited = app.post("b")
    await app.until(lambda: app.engine.stats().num_waiting == 4)
    clock.advance(3_000)
    answers = await asyncio.gather(*limited, unlimited)
    assert [answer.status_code for answer in answers] == [503, 200, 503, 200]
    assert answers[0].json()["error"]["code"] == "start_deadline"
    assert "2 s" in answers[0].json()["error"]["message"]
    assert answers[2].headers["retry-after"] == "1"
    assert (await running).status_code == 200


async def test_a_choice_of_a_stream_that_has_begun_is_not_refused(
    tokenizer: Tokenizer, apps: list[App]
) -> None:
    app = App(tokenizer, max_running=1, max_waiting=2)
    apps.append(app)
    body = {"model": "m", "prompt": "x", "max_tokens": 60, "n": 2, "stream": True, "ignore_eos": True}
    headers = {"Authorization": "Bearer flex"}
    pieces: list[str] = []

    async def read() -> None:
        async with app.client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            async for line in response.aiter_lines():
                pieces.append(line)

    stream = asyncio.create_task(read())
    await app.until(lambda: app.engine.stats().num_waiting == 1 and app.engine.counters.emitted_tokens > 2)
    answers = await asyncio.gather(app.post("first"), app.post("first"))  # one more than there is room for
    assert [answer.status_code for answer in answers] == [200, 200]
    await stream
    assert app.engine.stats().num_refused == 1
    ends = [line for line in pieces if '"finish_reason":"length"' in line.replace(" ", "")]
    assert len(ends) == 2
    assert not [line for line in pieces if "error" in line]
