"""The official client's own examples against the application in this process, engine scripted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from dspark_ray.core.config import parse_app_config
from dspark_ray.core.types import Request
from dspark_ray.models.grammar import GrammarVocabulary
from dspark_ray.models.tokenizer import Tokenizer
from tests.fakes import FakeEngine
from tests.local_app import LocalApp, compile_here
from tests.tiny import TOKENIZER_VOCAB_SIZE, tiny_tokenizer_dir

END = 2
MESSAGES: Any = [{"role": "user", "content": "What is it?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_tokenizer_dir(tmp_path_factory.mktemp("tokenizer"))
    config = {"model_type": "llama", "vocab_size": TOKENIZER_VOCAB_SIZE}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


@pytest.fixture(scope="module")
def vocabulary(model_dir: Path) -> GrammarVocabulary:
    return GrammarVocabulary.load(model_dir)


class Scripted(LocalApp):
    """Answers every request with one text, and ends."""

    def __init__(
        self, tokenizer: Tokenizer, vocabulary: GrammarVocabulary, text: str, **serving: Any
    ) -> None:
        tokens = [*tokenizer.encode(text), END]
        config = parse_app_config({"model": {"id": "m", "max_model_len": 4096}, "serving": serving})

        def say(request: Request, position: int) -> int:
            return tokens[position]

        engine = FakeEngine(config, step_ms=0.0, say=say)
        super().__init__(tokenizer, engine, config, compile_here(vocabulary))
        self.openai = openai.AsyncOpenAI(
            base_url="http://test/v1", api_key="unused", http_client=self.client, max_retries=0
        )
        self._vocabulary = vocabulary
        self._tokens = tokens

    def is_legal(self) -> bool:
        """The last request came with a grammar, and its answer follows it to the end."""
        grammar = self.local.submitted[-1].grammar
        assert grammar is not None
        walk = self._vocabulary.walk(self._vocabulary.load_grammar(grammar))
        return all(walk.accept(token) for token in self._tokens) and walk.ended


@pytest.fixture
def app(tokenizer: Tokenizer, vocabulary: GrammarVocabulary) -> Callable[..., Scripted]:
    return lambda text, **serving: Scripted(tokenizer, vocabulary, text, **serving)


async def test_chat_and_its_stream(app: Callable[..., Scripted]) -> None:
    client = app("It is a test. é🙂").openai
    answer = await client.chat.completions.create(model="m", messages=MESSAGES, n=2)
    assert [choice.message.content for choice in answer.choices] == ["It is a test. é🙂"] * 2
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    async with client.chat.completions.stream(
        model="m", messages=MESSAGES, stream_options={"include_usage": True}
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "It is a test. é🙂"
    assert answer.usage is not None
    assert final.usage is not None
    assert 2 * final.usage.completion_tokens == answer.usage.completion_tokens


async def test_structured_parse(app: Callable[..., Scripted]) -> None:
    scripted = app('{"name": "Ada", "age": 36}')
    answer = await scripted.openai.chat.completions.parse(
        model="m", messages=MESSAGES, response_format=Person
    )
    assert answer.choices[0].message.parsed == Person(name="Ada", age=36)
    assert scripted.is_legal()
    response = await scripted.openai.responses.parse(model="m", input="Who?", text_format=Person)
    assert response.output_parsed == Person(name="Ada", age=36)
    assert scripted.is_legal()


@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}]
)
async def test_tools(app: Callable[..., Scripted], choice: Any) -> None:
    scripted = app(CALL)
    answer = await scripted.openai.chat.completions.create(
        model="m", messages=MESSAGES, tools=TOOLS, tool_choice=choice
    )
    message = answer.choices[0].message
    assert message.content is None
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    assert answer.choices[0].finish_reason == ("stop" if isinstance(choice, dict) else "tool_calls")
    if choice != "auto":
        assert scripted.is_legal()
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    history = [*MESSAGES, message.model_dump(exclude_none=True), result]
    await scripted.openai.chat.completions.create(model="m", messages=history, tools=TOOLS)


async def test_streamed_and_parallel_tool_calls(app: Callable[..., Scripted]) -> None:
    scripted = app(f"{CALL}\n{CALL}")
    async with scripted.openai.chat.completions.stream(
        model="m", messages=MESSAGES, tools=TOOLS, tool_choice="required"
    ) as stream:
        final = await stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Oslo"}] * 2
    assert len({call.id for call in calls}) == 2
    assert final.choices[0].finish_reason == "tool_calls"
    assert scripted.is_legal()


async def test_without_tools_or_with_none_their_syntax_is_text(app: Callable[..., Scripted]) -> None:
    client = app(CALL).openai
    for extra in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = await client.chat.completions.create(model="m", messages=MESSAGES, **extra)
        assert answer.choices[0].message.content == CALL
        assert answer.choices[0].message.tool_calls is None


async def test_thoughts_are_split_off(app: Callable[..., Scripted]) -> None:
    scripted = app("<think>\nhm\n</think>\n\nyes", reasoning="think")
    answer = await scripted.openai.chat.completions.create(
        model="m", messages=MESSAGES, extra_body={"guided_choice": ["yes", "no"]}
    )
    message: Any = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", "yes")
    assert scripted.is_legal()  # the constraint holds for what follows the thoughts
    stream = await scripted.openai.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    deltas: list[Any] = [chunk.choices[0].delta async for chunk in stream]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.content or "" for delta in deltas) == "yes"


async def test_the_responses_api(app: Callable[..., Scripted]) -> None:
    client = app("<think>hm</think>It is.", reasoning="think").openai
    response = await client.responses.create(model="m", instructions="Be brief.", input="What is it?")
    assert response.output_text == "It is."
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.output_tokens == len("<think>hm</think>It is.") + 1
    history: Any = [
        {"role": "user", "content": "What is it?"},
        *response.output,
        {"role": "user", "content": "?"},
    ]
    again = await client.responses.create(model="m", input=history, max_output_tokens=3)
    assert again.status == "incomplete"
    assert again.incomplete_details is not None
    assert again.incomplete_details.reason == "max_output_tokens"


async def test_the_responses_api_streams(app: Callable[..., Scripted]) -> None:
    client = app("<think>hm</think>It is.", reasoning="think").openai
    events = []
    async with client.responses.stream(model="m", input="What is it?") as stream:
        async for event in stream:
            events.append(event)
        final = await stream.get_final_response()
    assert final.output_text == "It is."
    assert [event.sequence_number for event in events] == sorted(event.sequence_number for event in events)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 2
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == "It is."


async def test_the_responses_api_calls_tools(app: Callable[..., Scripted]) -> None:
    scripted = app(CALL)
    tools: Any = [{"type": "function", "strict": True, **TOOLS[0]["function"]}]
    arguments = {"model": "m", "input": "Weather?", "tools": tools, "tool_choice": "required"}
    response: Any = await scripted.openai.responses.create(**arguments)
    (call,) = response.output
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call", "get_weather", {"city": "Oslo"},
    )  # fmt: skip
    assert scripted.is_legal()
    async with scripted.openai.responses.stream(**arguments) as stream:
        final: Any = await stream.get_final_response()
    assert json.loads(final.output[0].arguments) == {"city": "Oslo"}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    await scripted.openai.responses.create(model="m", input=[call, output], tools=tools)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"guided_grammar": "root ::= x"}, "invalid_grammar"),
        ({"guided_regex": "["}, "invalid_grammar"),
        ({"guided_json": {"type": "nonsense"}}, "invalid_grammar"),
        ({"guided_json": "no json"}, "invalid_grammar"),
        ({"guided_regex": "a" * 300_000}, "invalid_grammar"),
    ],
)
async def test_grammars_that_are_none(app: Callable[..., Scripted], fields: Any, code: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            await app("x").openai.chat.completions.create(
                model="m", messages=MESSAGES, stream=stream, extra_body=fields
            )
        assert caught.value.code == code


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"store": True},
        {"background": True},
        {"input": [{"type": "image_generation_call"}]},
        {"tools": [{"type": "web_search"}]},
        {"nonsense": 1},
        {"input": 5},
    ],
)
async def test_what_the_responses_api_has_not(app: Callable[..., Scripted], fields: Any) -> None:
    response = await app("x").client.post("/v1/responses", json={"model": "m", "input": "hi", **fields})
    assert response.status_code == 400
    assert response.json()["error"]["message"]
