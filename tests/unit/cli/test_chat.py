"""`chat`: what is sent, what is shown, what is remembered."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from dspark_ray.cli import chat
from dspark_ray.cli.chat import LocalPartner, Pieces, ServerPartner, talk
from dspark_ray.cli.common import LocalEngine
from dspark_ray.core.errors import ConfigError, RequestError
from dspark_ray.models.tokenizer import Tokenizer
from tests.tiny import TOKENIZER_VOCAB_SIZE, tiny_tokenizer_dir
from tests.tiny_engine import tiny_config, tiny_engine

Messages = list[dict[str, str]]


class Echo:
    """Answers with the number of messages; fails on 'bad'."""

    def __init__(self) -> None:
        self.seen: list[Messages] = []

    def stream(self, messages: Messages) -> Pieces:
        self.seen.append(messages)
        if messages[-1]["content"] == "bad":
            raise RequestError("refused")
        if messages[-1]["content"] == "interrupt":
            yield "half"
            raise KeyboardInterrupt
        yield from ("answer ", str(len(messages)))

    def summary(self) -> str:
        return "2 tokens"


def say(monkeypatch: pytest.MonkeyPatch, *lines: str, system: str | None = None) -> list[Messages]:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
    partner = Echo()
    talk(partner, system)
    return partner.seen


def test_turns_are_remembered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen = say(monkeypatch, "one", "", "two", system="be brief")
    assert [m["content"] for m in seen[1]] == ["be brief", "one", "answer 2", "two"]
    assert "answer 4" in capsys.readouterr().out


def test_reset_and_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = say(monkeypatch, "one", "/reset", "two", "/exit", "three", system="s")
    assert [m["content"] for m in seen[-1]] == ["s", "two"]


def test_a_refusal_is_forgotten(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen = say(monkeypatch, "bad", "good")
    assert [m["content"] for m in seen[-1]] == ["good"]
    assert "refused" in capsys.readouterr().err


def test_an_interrupted_answer_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = say(monkeypatch, "interrupt", "next")
    assert [m["content"] for m in seen[-1]] == ["interrupt", "half", "next"]


@pytest.fixture
def local(tmp_path: Path) -> LocalEngine:
    (tmp_path / "model").mkdir()
    tokenizer = Tokenizer.load(tiny_tokenizer_dir(tmp_path / "model"))
    return LocalEngine(tiny_config(), tiny_engine(None, vocab_size=TOKENIZER_VOCAB_SIZE), tokenizer)


def test_a_local_answer(local: LocalEngine) -> None:
    partner = LocalPartner(local, max_tokens=8, temperature=0.0)
    messages = [{"role": "user", "content": "hi"}]
    first = "".join(partner.stream(messages))
    assert first == "".join(partner.stream(messages))
    assert partner.summary().startswith("8 tokens")
    assert not local.engine.has_work()


def test_a_local_answer_ends_where_a_served_one_does(local: LocalEngine) -> None:
    partner = LocalPartner(local, max_tokens=8, temperature=0.0)
    assert partner._sampling(3).stop_token_ids == local.tokenizer.eos_token_ids != ()


def test_closing_a_local_answer_aborts_it(local: LocalEngine) -> None:
    pieces = LocalPartner(local, max_tokens=50, temperature=0.0).stream([{"role": "user", "content": "hi"}])
    next(pieces)
    pieces.close()
    assert not local.engine.has_work()


def test_a_conversation_too_long(local: LocalEngine) -> None:
    with pytest.raises(RequestError, match="/reset"):
        next(LocalPartner(local, 8, 0.0).stream([{"role": "user", "content": "x" * 200}]))


class Lines(httpx.SyncByteStream):
    def __init__(self, *events: object) -> None:
        self._data = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]

    def __iter__(self) -> Iterator[bytes]:
        yield from [*self._data, b"data: [DONE]\n\n"]


def server(monkeypatch: pytest.MonkeyPatch, answer: httpx.Response) -> ServerPartner:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        body = json.loads(request.content)
        assert body["model"] == "m"
        assert body["stream_options"] == {"include_usage": True}
        return answer

    real = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **k: real(transport=httpx.MockTransport(handler), **k))
    return ServerPartner("http://server/v1/", 8, 0.0)


def test_a_servers_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "he"}}]},
        {"choices": [{"delta": {"content": "llo"}}]},
        {"choices": [], "usage": {"completion_tokens": 2}},
    ]
    partner = server(monkeypatch, httpx.Response(200, stream=Lines(*events)))
    assert "".join(partner.stream([{"role": "user", "content": "hi"}])) == "hello"
    assert partner.summary().startswith("2 tokens")


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(400, json={"error": {"message": "too long"}}),
        httpx.Response(200, stream=Lines({"error": {"message": "too long"}})),
    ],
)
def test_a_servers_error(monkeypatch: pytest.MonkeyPatch, answer: httpx.Response) -> None:
    partner = server(monkeypatch, answer)
    with pytest.raises(RequestError, match="too long"):
        list(partner.stream([{"role": "user", "content": "hi"}]))


def test_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    real = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **k: real(transport=httpx.MockTransport(refuse), **k))
    with pytest.raises(ConfigError, match="no OpenAI-compatible server"):
        chat.ServerPartner("http://server", 8, 0.0)
