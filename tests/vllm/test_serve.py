"""vLLM's engine through Ray Serve with the default model: each kind of request, counters, and its death."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray
from ray import serve

from deployments.app import build_app
from dspark_ray.core.config import parse_app_config
from tests.ray.conftest import Fleet, cluster, eventually, http_port  # noqa: F401  (fixtures)

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(900)]

MODEL = "smollm2-135m-instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
START_TIMEOUT_S = 300.0

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"enum": ["France", "Spain"]}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module", params=["off", "ngram"])
def fleet(request: pytest.FixtureRequest, cluster: str) -> Iterator[Fleet]:  # noqa: F811
    drafter = {"kind": "ngram"} if request.param == "ngram" else {"kind": "none"}
    config = parse_app_config(
        {
            "model": {"dtype": "float32", "max_model_len": 1024},
            "engine": {"kind": "vllm", "num_threads": 1, "kv_block_size": 32, "kv_num_blocks": 128},
            "speculation": {"drafter": drafter, "num_draft_tokens": 4, "mode": "fixed"},
            # Compiling takes minutes and changes nothing that is looked at here.
            "vllm": {"device": "cpu", "engine_args": {"enforce_eager": True}},
        }
    )
    serve.run(build_app(config), name=request.param, route_prefix=f"/{request.param}")
    fleet = Fleet(f"{cluster}/{request.param}", request.param)
    fleet.client.timeout = 300.0
    eventually(lambda: fleet.client.get("/ready").status_code == 200, timeout_s=START_TIMEOUT_S, period_s=0.5)
    yield fleet
    fleet.client.close()
    serve.delete(request.param)


def chat(fleet: Fleet, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 40, **fields}
    response = fleet.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_a_chat(fleet: Fleet) -> None:
    answer = chat(fleet)
    (choice,) = answer["choices"]
    assert "Paris" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["completion_tokens"] == len(chat(fleet, logprobs=True)["choices"][0]["logprobs"]["content"])
    details = usage["completion_tokens_details"]
    drafted = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
    assert drafted == 0 or fleet.app_name == "ngram"


def test_a_streamed_completion_ends_by_length_and_by_a_stop_string(fleet: Fleet) -> None:
    body = {"model": MODEL, "prompt": "1 2 3 4 5 1 2 3 4 5 1 2 3", "temperature": 0, "ignore_eos": True}
    text, usage, reason = stream(fleet, {**body, "max_tokens": 50})
    assert (usage["completion_tokens"], reason) == (50, "length")
    stop = text[20:24]
    cut, usage, reason = stream(fleet, {**body, "max_tokens": 400, "stop": [stop]})
    assert (cut, reason) == (text[: text.index(stop)], "stop")
    assert usage["completion_tokens"] <= 50
    eventually(fleet.is_idle, timeout_s=10.0)


def stream(fleet: Fleet, body: dict[str, Any]) -> tuple[str, dict[str, Any], str]:
    """Text, usage and finish reason."""
    text, usage, reason = "", {}, ""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with fleet.client.stream("POST", "/v1/completions", json={**body, **options}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    text += choice["text"]
                    reason = choice["finish_reason"] or reason
    return text, usage, reason


def test_a_schema_and_a_choice(fleet: Fleet) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    answer = chat(fleet, response_format=wanted, max_tokens=120)
    place = json.loads(answer["choices"][0]["message"]["content"])
    assert place["country"] in ("France", "Spain")
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert chat(fleet, guided_choice=["Lyon", "Nice"])["choices"][0]["message"]["content"] in ("Lyon", "Nice")


def test_a_tool_call(fleet: Fleet) -> None:
    answer = chat(fleet, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=120)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")


def test_logprobs(fleet: Fleet) -> None:
    content = chat(fleet, logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    for one in content:  # greedy: what was taken is the likeliest
        assert one["logprob"] == one["top_logprobs"][0]["logprob"]
        assert len(one["top_logprobs"]) == 3
    body = {
        "model": MODEL,
        "prompt": "The capital of France is",
        "echo": True,
        "logprobs": 1,
        "max_tokens": 0,
    }
    (choice,) = fleet.client.post("/v1/completions", json=body).json()["choices"]
    values = choice["logprobs"]["token_logprobs"]
    assert values[0] is None
    assert all(value < 0 for value in values[1:])
    assert choice["text"] == "The capital of France is"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"speculation": {"enabled": False}}, "speculation"),
        ({"target_tokens_per_second": 5.0}, "target_tokens_per_second"),
        ({"max_tokens": 5000}, "max_tokens"),
    ],
)
def test_what_cannot_be_is_a_400(fleet: Fleet, fields: dict[str, Any], param: str) -> None:
    response = fleet.client.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": QUESTION, **fields}
    )
    if fleet.app_name == "off" and param == "speculation":  # nothing is drafted anyway
        assert response.status_code == 200
        return
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_the_counters_are_the_same_everywhere(fleet: Fleet) -> None:
    eventually(fleet.is_idle, timeout_s=10.0)
    told = fleet.client.get("/ready").json()["speculation"]
    for name in ("drafted", "verified", "accepted"):
        assert fleet.metric(f"dspark_{name}_tokens_total") == told[f"{name}_tokens"]
    assert fleet.metric("vllm:spec_decode_num_drafts_total") == fleet.metric("dspark_drafts_total")
    tau = fleet.metric("dspark_decode_tokens_total") / fleet.metric("dspark_request_steps_total")
    assert told["tau"] == pytest.approx(tau, abs=1e-4)
    lines = fleet.client.get("/metrics").text.splitlines()
    accepted = [line for line in lines if line.startswith("dspark_accepted_per_position_total{")]
    assert sum(float(line.split()[1]) for line in accepted) == told["accepted_tokens"]
    if fleet.app_name == "off":
        assert told["drafted_tokens"] == 0
        assert tau == 1.0
    else:
        assert told["accepted_tokens"] > 0
        assert tau > 1.0


def test_the_cores_death_costs_no_token(fleet: Fleet) -> None:
    """The replica fails its health at once and is replaced; its stream goes on. The last test."""
    if fleet.app_name == "off":
        pytest.skip("once is enough")
    body = {"model": MODEL, "prompt": "One, two, three, four", "temperature": 0, "ignore_eos": True}
    expected, _, _ = stream(fleet, {**body, "max_tokens": 600})
    found: list[tuple[str, dict[str, Any], str]] = []
    reader = threading.Thread(target=lambda: found.append(stream(fleet, {**body, "max_tokens": 600})))
    emitted = fleet.metric("dspark_emitted_tokens_total")
    reader.start()
    eventually(lambda: fleet.metric("dspark_emitted_tokens_total") > emitted + 20, timeout_s=60.0)
    (name,) = fleet.engines()
    actor = psutil.Process(ray.get(fleet.engines()[name].pid.remote()))
    cores = [
        one for one in actor.children(recursive=True) if "EngineCor" in " ".join([one.name(), *one.cmdline()])
    ]
    assert cores
    for core in cores:
        os.kill(core.pid, signal.SIGKILL)
    eventually(lambda: fleet.client.get("/ready").status_code == 503, timeout_s=30.0)
    eventually(lambda: fleet.client.get("/ready").status_code == 200, timeout_s=START_TIMEOUT_S, period_s=0.5)
    assert name not in fleet.engines()
    reader.join(timeout=START_TIMEOUT_S)
    ((text, usage, reason),) = found
    assert (text, usage["completion_tokens"], reason) == (expected, 600, "length")
    assert "Paris" in chat(fleet)["choices"][0]["message"]["content"]
