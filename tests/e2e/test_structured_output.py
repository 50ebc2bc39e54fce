"""The official client asks the real model for JSON, a tool call and a choice, with adaptive verification."""

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
