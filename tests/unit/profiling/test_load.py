"""The load generator against a scripted server."""

import json

import httpx
import pytest

from dspark_ray.core.errors import ConfigError
from dspark_ray.models.prompts import RawPrompt
from dspark_ray.profiling.load import (
    Arrival,
    ClientTiming,
    LoadReport,
    Slo,
    drive,
    drive_open,
    find_model,
)

PROMPTS = [
    RawPrompt(1, messages=({"role": "user", "content": "hi"},)),
    RawPrompt(2, text="plain"),
    RawPrompt(3, token_ids=(1, 2)),
]


def sse(*events: object) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


def answer(request: httpx.Request) -> httpx.Response:
    key = "delta" if request.url.path.endswith("/chat/completions") else "text"
    text = {"content": "hello"} if key == "delta" else "hello"
    events = [{"choices": [{key: text}]}, {"choices": [], "usage": {"completion_tokens": 5}}]
    return httpx.Response(200, content=sse(*events) + b"data: [DONE]\n\n")


def run(handler) -> LoadReport:
    transport = httpx.MockTransport(handler)
    return drive("http://server", "m", PROMPTS, concurrency=2, max_tokens=5, transport=transport)


def test_each_prompt_goes_to_its_route() -> None:
    seen: dict[str, list[dict]] = {}

    def handler(request: httpx.Request) -> httpx.Response:
        seen.setdefault(request.url.path, []).append(json.loads(request.content))
        return answer(request)

    figures = run(handler).figures()
    assert figures["errors"] == 0
    assert figures["output_tokens"] == 15
    assert [body["messages"][0]["content"] for body in seen["/v1/chat/completions"]] == ["hi"]
    assert sorted(map(str, (body["prompt"] for body in seen["/v1/completions"]))) == ["[1, 2]", "plain"]


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (httpx.Response(503, json={"error": {"message": "full"}}), "503"),
        (httpx.Response(200, content=sse({"error": {"message": "died"}})), "died"),
        (httpx.Response(200, content=sse({"choices": [{"text": "a"}]})), "without"),
        (httpx.Response(200, content=b"data: {nonsense\n\n"), "JSON"),
    ],
)
def test_failures_are_counted(response: httpx.Response, reason: str) -> None:
    report = run(lambda request: httpx.Response(response.status_code, content=response.content))
    assert report.figures()["errors"] == 3
    assert report.figures()["tokens_per_s"] == 0
    assert all(reason in timing.error for timing in report.timings)


def test_time_per_token_is_over_tokens() -> None:
    assert ClientTiming(11, 100.0, 1100.0).tpot_ms == 100.0
    assert ClientTiming(1, 100.0, 100.0).tpot_ms is None


def test_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(httpx, "get", refuse)
    with pytest.raises(ConfigError, match="no OpenAI-compatible server"):
        find_model("http://127.0.0.1:9")


def test_an_open_loop_sends_each_request_with_its_own_fields() -> None:
    bodies: list[dict] = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return answer(request)

    arrivals = [Arrival(0.0, PROMPTS[1], 7), Arrival(0.01, PROMPTS[1], 9, {"service_tier": "flex"})]
    report = drive_open("http://server", "m", arrivals, transport=httpx.MockTransport(handler))
    assert report.figures()["output_tokens"] == 10
    assert [(body["max_tokens"], body.get("service_tier")) for body in bodies] == [(7, None), (9, "flex")]


def test_a_finish_reason_ends_a_stream_without_done() -> None:
    events = [
        {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 3, "completion_tokens": 1}},
        {"choices": [{"text": "b", "finish_reason": "length"}], "usage": {"completion_tokens": 2}},
    ]
    report = run(lambda request: httpx.Response(200, content=sse(*events)))
    assert report.figures()["output_tokens"] == 6
    assert report.finish_reasons() == {"length": 3}
    assert {timing.text for timing in report.timings} == {"ab"}


def test_tokens_that_nobody_counted_are_an_error() -> None:
    report = run(lambda request: httpx.Response(200, content=b"data: [DONE]\n\n"))
    assert report.figures()["errors"] == 3


def test_goodput_counts_what_was_soon_and_quick_enough() -> None:
    timings = [
        ClientTiming(11, 100.0, 1100.0),
        ClientTiming(11, 300.0, 1300.0),  # late
        ClientTiming(11, 100.0, 2100.0),  # slow
        ClientTiming(1, 100.0, 100.0),
        ClientTiming(0, 10.0, 10.0, "refused"),
    ]
    goodput = LoadReport(5, 2.0, timings).goodput(Slo(ttft_ms=200.0, tpot_ms=100.0))
    assert goodput == {"goodput_requests_per_s": 1.0, "goodput_tokens_per_s": 6.0, "within_slo": 0.4}
