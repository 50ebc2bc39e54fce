"""What the official client's own examples ask for, of the real model, with adaptive verification."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from dspark_ray.core.config import parse_app_config
from dspark_ray.engine.build import build_engine
from dspark_ray.models.fetch import resolve_model
from dspark_ray.models.tokenizer import Tokenizer
from dspark_ray.serving.grammar_compiler import GrammarCompiler
from tests.local_app import LocalApp

CHECKPOINT = Path(__file__).resolve().parents[2] / "models" / "smollm2-135m-dspark-block7"
MESSAGES: Any = [{"role": "user", "content": "Is the sky blue on a clear day? Answer in JSON."}]


class Answer(BaseModel):
    answer: Literal["yes", "no"]
    confidence: Literal["low", "medium", "high"]


@pytest.fixture
async def app() -> AsyncIterator[LocalApp]:
    config = parse_app_config(
        {
            "model": {"max_model_len": 1024},
            "engine": {"kv_num_blocks": 256},
            "speculation": {"mode": "adaptive", "drafter": {"kind": "dspark", "path": str(CHECKPOINT)}},
        }
    )
    model_dir = resolve_model("default")
    engine = build_engine(config, model_dir=model_dir)
    compiler = GrammarCompiler.of_model(model_dir, timeout_s=20.0)
    yield LocalApp(Tokenizer.load(model_dir), engine, config, compiler.compile)
    await compiler.close()


async def test_the_real_model_keeps_to_what_was_asked(app: LocalApp) -> None:
    client = openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="unused", http_client=app.client, max_retries=0
    )
    common: Any = {"model": "smollm2-135m-instruct", "messages": MESSAGES, "max_tokens": 200}
    parsed = await client.chat.completions.parse(**common, temperature=0, response_format=Answer)
    assert parsed.choices[0].message.parsed is not None
    assert parsed.choices[0].finish_reason == "stop"
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": schema}}]
    called = await client.chat.completions.create(
        **common, temperature=1, tools=tools, tool_choice="required", parallel_tool_calls=False
    )
    (call,) = called.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    chosen = await client.chat.completions.create(**common, extra_body={"guided_choice": ["blue", "green"]})
    assert chosen.choices[0].message.content in ("blue", "green")
    counters = app.local.engine.stats().counters
    assert counters.drafted_tokens > 0
    assert counters.accepted_tokens > 0


async def test_the_official_clients_examples(app: LocalApp) -> None:
    client = openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="unused", http_client=app.client, max_retries=0
    )
    common: Any = {"model": "smollm2-135m-instruct", "messages": MESSAGES, "max_tokens": 24, "seed": 5}
    whole = await client.chat.completions.create(**common, n=2, logprobs=True, top_logprobs=3)
    first, second = whole.choices
    assert first.message.content != second.message.content
    assert whole.usage is not None
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert all(len(token.top_logprobs) == 3 for token in choice.logprobs.content)
    tokens = [token for choice in whole.choices for token in choice.logprobs.content]  # type: ignore[union-attr]
    assert whole.usage.completion_tokens == len(tokens)

    stream = await client.chat.completions.create(
        **common, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == first.message.content  # one seed, one text
    assert chunks[-1].usage is not None

    in_full = common | {"max_tokens": 200}
    async with client.chat.completions.stream(**in_full, response_format=Answer) as events:
        assert any([event.type == "content.done" async for event in events])
        parsed = (await events.get_final_completion()).choices[0].message.parsed
    assert isinstance(parsed, Answer)

    question: Any = {"model": "smollm2-135m-instruct", "input": "Hello!", "max_output_tokens": 24}
    answer = await client.responses.create(**question, temperature=0)
    async with client.responses.stream(**question, temperature=0) as streamed:
        deltas = [event.delta async for event in streamed if event.type == "response.output_text.delta"]
    assert "".join(deltas) == answer.output_text != ""
    in_form = await client.responses.parse(**question | {"max_output_tokens": 200}, text_format=Answer)
    assert isinstance(in_form.output_parsed, Answer)

    plain = await client.completions.create(
        model="smollm2-135m-instruct", prompt="The sky is", max_tokens=5, temperature=0, logprobs=2, echo=True
    )
    assert plain.choices[0].text.startswith("The sky is")
