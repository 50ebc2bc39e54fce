"""API keys: who gets in, how far, and what a key has left. Over ASGI, with time under control."""

import asyncio
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dspark_ray.core.clock import ManualClock
from dspark_ray.core.config import SecurityConfig, parse_app_config
from dspark_ray.core.errors import ConfigError
from dspark_ray.core.types import ServiceTier
from dspark_ray.models.tokenizer import Tokenizer
from dspark_ray.serving.api_keys import ApiKey, KeyRing, digest_of, new_key, parse_keys
from dspark_ray.serving.errors import RateLimitError
from dspark_ray.serving.limits import Accounts, Bucket
from tests.fakes import FakeEngine
from tests.local_app import LocalApp
from tests.tiny import tiny_tokenizer_dir

ALICE, BOB, ROOT = new_key(), new_key(), new_key()
MARKER = "xylophone"


def line(name: str, key: str, **fields: Any) -> str:
    return json.dumps({"name": name, "sha256": digest_of(key), **fields})


LINES = [
    "# who may ask",
    line("alice", ALICE, tier="priority", requests_per_minute=3, tokens_per_minute=100),
    "",
    line("bob", BOB, concurrent_requests=1, tier="flex"),
    line("root", ROOT, admin=True),
]


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.jsonl"
    path.write_text("\n".join(LINES))
    return path


class App(LocalApp):
    """A guarded application; every request is made with a key."""

    def __init__(self, tokenizer: Tokenizer, keys_file: Path, clock: ManualClock, **security: Any) -> None:
        config = parse_app_config(
            {
                "model": {"id": "m", "max_model_len": 256},
                "engine": {"max_running": 4, "max_waiting": 2},
                "speculation": {
                    "drafter": {"kind": "ngram"},
                    "hot_swap": {"load_from": str(keys_file.parent)},
                },
                "lora": {"load_from": str(keys_file.parent)},
                "security": {"api_keys_file": str(keys_file), **security},
            }
        )
        self.engine = FakeEngine(config, step_ms=0.0)
        super().__init__(
            tokenizer, self.engine, config, keys=KeyRing.of(config.security, clock), key_clock=clock
        )

    async def ask(self, key: str | None, **fields: Any) -> httpx.Response:
        body = {"model": "m", "prompt": "abc", "max_tokens": 6, **fields}
        return await self.client.post("/v1/completions", json=body, headers=bearer(key))


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(tiny_tokenizer_dir(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def app(tokenizer: Tokenizer, keys_file: Path, clock: ManualClock) -> Iterator[App]:
    app = App(tokenizer, keys_file, clock)
    yield app
    assert app.local.is_idle


def refusal(response: httpx.Response) -> tuple[int, str]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    return response.status_code, error["code"]


async def test_without_a_key_nothing_is_read(app: App) -> None:
    for key in (None, "", "wrong", ALICE[:-1], digest_of(ALICE)):
        response = await app.ask(key)
        assert refusal(response) == (401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    basic = await app.client.get("/v1/models", headers={"Authorization": f"Basic {ALICE}"})
    assert refusal(basic) == (401, "invalid_api_key")
    assert app.local.submitted == []
    assert (await app.ask(ALICE)).status_code == 200
    lower = await app.client.get("/v1/models", headers={"Authorization": f"bearer {BOB}"})
    assert lower.status_code == 200


async def test_probes_are_open_and_everything_else_is_not(app: App) -> None:
    for path in ("/health", "/ready", "/version", "/ui", "/ui/app.js"):
        assert (await app.client.get(path)).status_code != 401, path
    routes = {getattr(route, "path", "") for route in app.api.routes} - {"/health", "/ready", "/version"}
    for path in sorted(routes - {"/ui", "/ui/app.js"} | {"/nowhere", "/health/", "/v1/drafter/"}):
        assert (await app.client.get(path)).status_code == 401, path


async def test_operators_routes_want_an_admin_key(app: App) -> None:
    for path in ("/metrics", "/v1/drafter"):
        assert refusal(await app.client.get(path, headers=bearer(BOB))) == (403, "insufficient_permissions")
        assert (await app.client.get(path, headers=bearer(ROOT))).status_code == 200
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/drafter/swap"):
        response = await app.client.post(path, json={}, headers=bearer(BOB))
        assert refusal(response) == (403, "insufficient_permissions")
        response = await app.client.post(path, json={}, headers=bearer(ROOT))
        assert response.status_code == 400
    assert (await app.ask(ROOT)).status_code == 200


async def test_a_prompt_that_is_only_scored_takes_its_tokens(app: App) -> None:
    scored = {"prompt": "abc" * 20, "max_tokens": 0, "echo": True, "logprobs": 1}
    first = await app.ask(ALICE, **scored)
    assert first.json()["usage"]["completion_tokens"] == 0
    assert refusal(await app.ask(ALICE, **scored)) == (429, "rate_limit_exceeded")


async def test_metrics_may_be_open(tokenizer: Tokenizer, keys_file: Path, clock: ManualClock) -> None:
    app = App(tokenizer, keys_file, clock, open_metrics=True)
    assert (await app.client.get("/metrics")).status_code == 200
    assert (await app.client.get("/v1/drafter")).status_code == 401


async def test_requests_a_minute(app: App, clock: ManualClock) -> None:
    answers = [await app.ask(ALICE) for _ in range(3)]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0"]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "3"
    refused = await app.ask(ALICE)
    assert refusal(refused) == (429, "rate_limit_exceeded")
    assert refused.json()["error"]["type"] == "requests"
    assert refused.headers["retry-after"] == "20"
    assert (await app.ask(BOB)).status_code == 200  # another key has its own
    assert (await app.client.get("/v1/models", headers=bearer(ALICE))).status_code == 200
    clock.advance(20_000)
    assert (await app.ask(ALICE)).status_code == 200


async def test_tokens_a_minute_are_taken_in_advance_and_given_back(app: App, clock: ManualClock) -> None:
    """alice has 100; a prompt of 3 and at most 90 more are reserved, and 9 are used."""
    first = await app.ask(ALICE, max_tokens=90, stop="cab")
    assert first.status_code == 200
    used = first.json()["usage"]["total_tokens"]
    assert first.headers["x-ratelimit-remaining-tokens"] == "7"
    assert used < 20
    second = await app.ask(ALICE, max_tokens=97 - used, stream=True)  # just what is left
    assert second.status_code == 200
    refused = await app.ask(ALICE, max_tokens=50)
    assert refusal(refused) == (429, "rate_limit_exceeded")
    assert refused.json()["error"]["type"] == "tokens"
    assert int(refused.headers["retry-after"]) == 32  # 53 tokens at 100 a minute
    clock.advance(60_000)
    assert (await app.ask(ALICE, max_tokens=200)).status_code == 200  # more than a minute's worth: a debt
    clock.advance(60_000)
    assert (await app.ask(ALICE, max_tokens=1)).status_code == 429


async def test_a_refused_request_costs_no_tokens(app: App) -> None:
    assert (await app.ask(ALICE, max_tokens=90, model="other")).status_code == 404
    assert (await app.ask(ALICE, max_tokens=90)).status_code == 200


async def test_requests_at_once(app: App) -> None:
    both = await asyncio.gather(app.ask(BOB, max_tokens=100, stream=True), app.ask(BOB))
    assert sorted(answer.status_code for answer in both) == [200, 429]
    refused = next(answer for answer in both if answer.status_code == 429)
    assert refused.headers["retry-after"] == "1"
    assert (await app.ask(BOB)).status_code == 200  # the stream has ended


async def test_a_key_has_a_tier_and_none_above_it(app: App) -> None:
    await app.ask(BOB)
    await app.ask(ALICE)
    await app.ask(ALICE, service_tier="flex", priority=3)
    told = [
        (request.client, request.priority.tier, request.priority.level) for request in app.local.submitted
    ]
    assert told == [
        ("bob", ServiceTier.FLEX, 0),
        ("alice", ServiceTier.PRIORITY, 0),
        ("alice", ServiceTier.FLEX, 3),
    ]
    for fields in ({"service_tier": "default"}, {"priority": -1}, {"target_tokens_per_second": 50.0}):
        refused = await app.ask(BOB, **fields)
        assert refusal(refused) == (403, "insufficient_permissions")
        assert refused.json()["error"]["param"] == next(iter(fields))


async def test_a_changed_file_counts_and_a_broken_one_does_not(
    app: App, keys_file: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    carol = new_key()

    def write(text: str | None, version: int = 0) -> None:
        if text is None:
            keys_file.unlink()
        else:
            keys_file.write_text(text)
            os.utime(keys_file, ns=(version, version))
        clock.advance(2_000)

    write("\n".join([*LINES[:-1], line("carol", carol)]), 1)
    assert (await app.ask(carol)).status_code == 200
    assert (await app.ask(ROOT)).status_code == 401
    with caplog.at_level(logging.ERROR):
        write(carol, 2)  # a key in clear, by mistake
        assert (await app.ask(carol)).status_code == 200
    assert "the API keys stay as they were" in caplog.text
    assert carol not in caplog.text
    write(None)
    assert (await app.ask(carol)).status_code == 200
    write("# nobody\n", 3)
    assert (await app.ask(carol)).status_code == 401  # taken out, not broken


def test_a_server_without_a_key_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    path.write_text("\n# none yet\n")
    with pytest.raises(ConfigError, match="no API key; `dspark-ray new-key"):
        KeyRing.of(SecurityConfig(api_keys_file=str(path)))


async def test_no_log_line_has_a_prompt_or_a_key(app: App, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for fields in ({}, {"top_p": MARKER}, {"stop": MARKER}, {"stream": True}, {"model": MARKER}):
            await app.ask(BOB, prompt=MARKER, **fields)
        await app.client.post("/v1/completions", content=f'{{"{MARKER}', headers=bearer(BOB))
        await app.ask("dsk-wrong-" + MARKER)
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith("httpx")]
    assert not [message for message in ours if MARKER in message or BOB in message]


def test_a_key_shows_its_hash_to_nobody() -> None:
    (known,) = parse_keys([line("alice", ALICE)], "test")
    assert known.sha256 not in repr(known)
    assert known.sha256 not in str(known)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "line 1"),
        ([line("a", ALICE, colour="red")], "colour"),
        ([line("a", ALICE), line("a", BOB)], "the same name"),
        ([line("a", ALICE), line("b", ALICE)], "the same hash"),
        ([json.dumps({"name": "a", "sha256": ALICE})], "sha256"),
        ([line("a b", ALICE)], "name"),
    ],
)
def test_broken_lines_are_refused_without_telling_them(lines: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        parse_keys(lines, "keys.jsonl")
    assert ALICE not in str(error.value)
    assert digest_of(ALICE) not in str(error.value)


def test_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SecurityConfig(api_keys_from_environment=True)
    monkeypatch.delenv("DSPARK_API_KEYS", raising=False)
    with pytest.raises(ConfigError, match="DSPARK_API_KEYS is empty"):
        KeyRing.of(config)
    monkeypatch.setenv("DSPARK_API_KEYS", "\n".join(LINES))
    ring = KeyRing.of(config)
    assert ring is not None
    found = ring.find(BOB)
    assert found is not None
    assert found.name == "bob"
    assert ring.find(ALICE + "x") is None
    assert KeyRing.of(SecurityConfig()) is None


def test_several_processes_share_a_limit() -> None:
    clock = ManualClock()
    key = ApiKey(name="a", sha256=digest_of(ALICE), requests_per_minute=10, concurrent_requests=5)
    halves = [Accounts(2, clock) for _ in range(2)]

    def admit(accounts: Accounts, num: int) -> int:
        admitted = 0
        for _ in range(num):
            try:
                ticket = accounts.open(key)
            except RateLimitError:
                continue
            ticket.close()
            admitted += 1
        return admitted

    assert [admit(half, 20) for half in halves] == [5, 5]
    clock.advance(60_000)
    tickets = [halves[0].open(key) for _ in range(2)]
    with pytest.raises(RateLimitError, match="running"):
        halves[0].open(key)
    for ticket in tickets:
        ticket.close()


def test_a_bucket_holds_its_rate_in_the_long_run() -> None:
    clock = ManualClock()
    bucket, taken = Bucket(600.0, clock), 0.0
    for _ in range(1000):
        clock.advance(700)
        if bucket.wait_s(9.0) == 0:
            bucket.take(9.0)
            taken += 9.0
    assert 600.0 * 700 / 60 * 0.98 < taken <= 600.0 * 700 / 60 + 600.0
