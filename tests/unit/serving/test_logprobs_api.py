"""Log-probabilities and echoed prompts over the routes, in OpenAI's shapes, streamed or not."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dspark_ray.core.config import parse_app_config
from dspark_ray.models.tokenizer import Tokenizer
from tests.fakes import FakeEngine
from tests.local_app import LocalApp
from tests.tiny import tiny_tokenizer_dir

CONFIG = parse_app_config({"model": {"id": "m", "max_model_len": 256}})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(tiny_tokenizer_dir(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
async def app(tokenizer: Tokenizer) -> AsyncIterator[LocalApp]:
    app = LocalApp(tokenizer, FakeEngine(CONFIG, step_ms=0.0), CONFIG)
    yield app
    await app.settle()


async def answer(app: LocalApp, route: str, **fields: Any) -> dict[str, Any]:
    """The body; a stream's chunks put together to one."""
    prompt = {"messages": [{"role": "user", "content": "é"}]} if route == "chat/" else {"prompt": "aé"}
    response = await app.client.post(f"/v1/{route}completions", json={"model": "m", **prompt, **fields})
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        return response.json()
    choices: dict[int, dict[str, Any]] = {}
    for line in response.text.split("\n\n")[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            whole = choices.setdefault(choice["index"], {"text": "", "logprobs": {}})
            whole["text"] += choice.get("text") or choice.get("delta", {}).get("content", "")
            for key, values in (choice["logprobs"] or {}).items():
                whole["logprobs"][key] = [*whole["logprobs"].get(key, []), *(values or [])]
    return {"choices": [choices[index] for index in sorted(choices)]}


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs(app: LocalApp, tokenizer: Tokenizer, stream: bool) -> None:
    body = await answer(app, "chat/", max_tokens=7, logprobs=True, top_logprobs=2, stream=stream)
    entries = body["choices"][0]["logprobs"]["content"]
    said = tokenizer.encode("user\né")
    assert [entry["logprob"] for entry in entries] == [-float(token_id) for token_id in said]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == "user\né".encode()
    assert entries[0]["token"] == "u"
    assert entries[-1]["token"] == "\ufffd"  # a part of é, whose bytes tell what it is
    assert [other["logprob"] for other in entries[0]["top_logprobs"]] == [0.0, -1.0]
    assert set(entries[0]["top_logprobs"][0]) == {"token", "logprob", "bytes"}


async def test_nothing_is_told_that_was_not_asked_for(app: LocalApp) -> None:
    assert (await answer(app, "chat/", max_tokens=4))["choices"][0]["logprobs"] is None
    without = await answer(app, "chat/", max_tokens=4, logprobs=True)
    assert without["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs_with_an_echoed_prompt(
    app: LocalApp, tokenizer: Tokenizer, stream: bool
) -> None:
    body = await answer(app, "", max_tokens=4, logprobs=1, echo=True, stream=stream)
    choice, (first, *rest) = body["choices"][0], tokenizer.encode("aé")
    said = [first, *rest, first]  # what the fake says: the prompt again
    assert choice["text"] == "aéaéa"
    told = choice["logprobs"]
    assert told["tokens"] == ["a", "\ufffd", "\ufffd"] * 2 + ["a"]
    assert told["token_logprobs"] == [None, *(-float(t) for t in (*rest, *said))]
    assert told["text_offset"] == list(range(7))
    assert told["top_logprobs"][0] is None
    assert len(told["top_logprobs"][3]) == 2  # the likeliest one and the one that was chosen


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_of_the_prompt_alone(app: LocalApp, stream: bool) -> None:
    body = await answer(app, "", prompt=["xy", "z"], max_tokens=0, echo=True, logprobs=0, stream=stream)
    assert [choice["text"] for choice in body["choices"]] == ["xy", "z"]
    assert [len(choice["logprobs"]["tokens"]) for choice in body["choices"]] == [2, 1]
    if not stream:
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 0


async def test_a_stop_string_ends_the_logprobs_with_the_text(app: LocalApp) -> None:
    body = await answer(app, "", prompt="abc", max_tokens=9, logprobs=0, stop=["ca"])
    choice = body["choices"][0]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "a"]  # as many as are counted
    assert body["usage"]["completion_tokens"] == 4
