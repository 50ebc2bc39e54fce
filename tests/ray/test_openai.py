"""The official client and plain HTTP against the real application, engines faked."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.ray.conftest import Fleet, eventually

MESSAGES: Any = [{"role": "user", "content": "hello"}]
ECHO = "user\nhello\nassistant\n"  # what the fake says to it, over and over


@pytest.fixture
def client(fleet: Fleet) -> openai.OpenAI:
    return openai.OpenAI(base_url=fleet.url + "/v1", api_key="unused", max_retries=0)


def test_the_official_client_chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=12)
    assert answer.choices[0].message.content == ECHO[:12]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 8
    assert [model.id for model in client.models.list().data] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"


def test_the_official_client_streams(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="fake",
            messages=MESSAGES,
            max_tokens=30,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert (ECHO * 2).startswith(text)
    assert len(text) > 20
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 30


def test_the_official_client_completes(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=["abc", "xy"], max_tokens=40, n=2, stop="ca")
    assert [choice.text for choice in answer.choices] == ["ab", "ab", "xy" * 20, "xy" * 20]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop", "length", "length"]


def test_errors_reach_the_official_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.chat.completions.create(model="other", messages=MESSAGES, stream=True)
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="fake", messages=MESSAGES, frequency_penalty=5)
    assert bad.value.param == "frequency_penalty"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ("{broken", 400, "invalid_json"),
        ("[" * 50_000, 400, "invalid_json"),
        ({"messages": []}, 400, "invalid_value"),
        ({"messages": "text"}, 400, "invalid_type"),
        ({"model": "other"}, 404, "model_not_found"),
        ({"temperature": "hot"}, 400, "invalid_type"),
        ({"temperature": 9}, 400, "invalid_value"),
        ({"stream": "yes"}, 400, "invalid_type"),
        ({"max_tokens": 10**9}, 400, "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "context_length_exceeded"),
        ({"response_format": {"type": "xml"}}, 400, "invalid_value"),
        ({"nonsense": 1}, 400, "unknown_parameter"),
        (" " * (9 << 20), 413, "request_too_large"),
    ],
)
def test_error_bodies(fleet: Fleet, body: Any, status: int, code: str) -> None:
    text = body if isinstance(body, str) else json.dumps({"model": "fake", "messages": MESSAGES, **body})
    response = fleet.client.post("/v1/chat/completions", content=text)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code), error
    assert error["message"]
    assert fleet.client.get("/health").status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts(fleet: Fleet, stream: bool) -> None:
    before = fleet.metric("dspark_requests_aborted_total")
    body = {"model": "fake", "prompt": "abc", "max_tokens": 4000, "n": 3, "stream": stream}
    if stream:
        with fleet.client.stream("POST", "/v1/completions", json=body) as response:
            chunks = response.iter_bytes()  # kept: dropping the iterator closes the connection
            next(chunks)
            eventually(lambda: not fleet.is_idle(), timeout_s=5.0)
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(fleet.url + "/v1/completions", json=body, timeout=1.0)
    eventually(fleet.is_idle, timeout_s=5.0)
    eventually(lambda: fleet.metric("dspark_requests_aborted_total") == before + 3, timeout_s=5.0)


def test_operations(fleet: Fleet) -> None:
    health = fleet.client.get("/health").json()
    assert health["replicas"] == {"expected": 2, "live": 2, "ready": 2}
    assert health["speculation"]["accepted_tokens"] > 0
    assert fleet.client.get("/version").json()["ray"]
    page = fleet.client.get("/metrics").text
    assert "vllm:spec_decode_num_drafts_total" in page
    assert "_created" not in page
