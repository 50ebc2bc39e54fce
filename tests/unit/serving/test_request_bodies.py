"""What clients may send, what is refused, and in which words."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from dspark_ray.core.errors import RequestError
from dspark_ray.core.types import Priority, ServiceTier
from dspark_ray.models.tokenizer import ChatPrompt
from dspark_ray.serving.json_body import parse_object, read_body
from dspark_ray.serving.messages import Message
from dspark_ray.serving.parsing import ServedModel, parse_chat, parse_completion
from dspark_ray.serving.unsupported import IGNORED, NO_OP_VALUES

USER = [{"role": "user", "content": "hi"}]


class CharTokenizer:
    """One token a character."""

    vocab_size = 0x250
    eos_token_ids = (3,)

    chat_template = ""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, token_ids))

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        return [chr(token_id) for token_id in token_ids]

    def chat_prompt(self, messages: list[dict[str, Any]], **options: Any) -> ChatPrompt:
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return ChatPrompt(text, self.encode(text))


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
MODEL = ServedModel("m", 64, CharTokenizer())


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": USER, **fields}


def test_a_request_says_what_it_claims_and_which_session_it_belongs_to() -> None:
    plain = parse_chat(chat(service_tier="auto"), MODEL).requests[0]
    assert (plain.priority, plain.session_key) == (Priority(), "")
    fields = {"service_tier": "priority", "priority": -3, "target_tokens_per_second": 30.5}
    request = parse_chat(chat(**fields, prompt_cache_key="chat 7"), MODEL).requests[0]
    assert request.priority == Priority(ServiceTier.PRIORITY, -3, 30.5)
    assert request.session_key == "chat 7"


def refused(body: dict[str, Any], parse: Any = parse_chat) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(body, MODEL)
    return caught.value


def test_the_template_ends_a_turn_unless_it_is_ignored() -> None:
    sampling = parse_chat(chat(stop_token_ids=[9, 3]), MODEL).requests[0].sampling
    assert sampling.stop_token_ids == (9, 3)
    assert parse_chat(chat(), MODEL).requests[0].sampling.stop_token_ids == (3,)
    assert parse_chat(chat(ignore_eos=True), MODEL).requests[0].sampling.stop_token_ids == ()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"nul",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
def test_broken_json_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse_object(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


async def test_a_body_is_read_up_to_its_limit() -> None:
    async def chunks() -> Any:
        for _ in range(3):
            yield b"ab"

    assert await read_body(chunks(), None, limit_bytes=6) == b"ababab"
    for length in (None, "7", "junk"):
        with pytest.raises(RequestError) as caught:
            await read_body(chunks(), length, limit_bytes=5)
        assert caught.value.status == 413


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def chunks() -> Any:
        yield b"{"
        await asyncio.Event().wait()

    with pytest.raises(RequestError, match="has not arrived") as caught:
        await read_body(chunks(), "2", timeout_s=0.02)
    assert caught.value.status == 408


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "hi", "extra": 1}]}, "messages.0.extra"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.id"),
        ({"messages": [{"role": "user", "content": "a", "reasoning_content": "b"}]}, "messages.0"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"service_tier": "scale"}, "service_tier"),
        ({"priority": 9}, "priority"),
        ({"target_tokens_per_second": 0}, "target_tokens_per_second"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": 1 << 70}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": "x"}, "seed"),
        ({"seed": 1 << 63}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stop": ""}, "stop.0"),
        ({"stop": [1]}, "stop.0"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"stop_token_ids": [0x250]}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, None),
        ({"speculation_details": True}, None),
        ({"stream": True, "stream_options": {"wrong": True}}, "stream_options.wrong"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 3.0}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, None),
        ({"ignore_eos": "no"}, "ignore_eos"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 2}, None),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"speculation": True}, "speculation"),
        ({"speculation": {"max_tokens": -1}}, "speculation.max_tokens"),
        ({"speculation": {"depth": 3}}, "speculation.depth"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [TOOL, TOOL]}, None),
        ({"tool_choice": "required"}, None),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, None),
        (
            {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, None),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"one": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"1": 5, "01": 5}}, "logit_bias"),
        ({"logit_bias": {str(0x250): 5}}, "logit_bias"),
        ({"logit_bias": {"9" * 30: 5}}, "logit_bias"),
        ({"bad_words": [""]}, "bad_words.0"),
        ({"bad_words": "word"}, "bad_words"),
        ({"allowed_token_ids": [0x250]}, "allowed_token_ids"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"skip_special_tokens": 0}, "skip_special_tokens"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_wrong_values_are_refused_by_name(fields: dict[str, Any], param: str | None) -> None:
    error = refused(chat(**fields))
    assert (error.status, error.param) == (400, param)
    assert error.message


@pytest.mark.parametrize("name", sorted(NO_OP_VALUES))
def test_a_known_parameter_passes_only_at_its_no_op(name: str) -> None:
    for value in (None, *NO_OP_VALUES[name]):
        parse_chat(chat(**{name: value}), MODEL)
    error = refused(chat(**{name: "something else"}))
    assert (error.param, error.code) == (name, "unsupported_parameter")


def test_booleans_are_not_numbers() -> None:
    assert refused(chat(best_of=True)).param == "best_of"
    assert refused(chat(echo=0)).param == "echo"


def test_parameters_without_effect_are_accepted() -> None:
    parse_chat(chat(**dict.fromkeys(IGNORED, "x")), MODEL)


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_an_unknown_model_is_a_404_whatever_else_is_wrong(parse: Any) -> None:
    error = refused({"model": "other", "nonsense": 1}, parse)
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")


def test_missing_fields_are_named() -> None:
    assert refused({"messages": USER}).code == "missing_required_parameter"
    assert refused({"model": "m"}).param == "messages"
    assert refused({"model": "m"}, parse_completion).param == "prompt"
    assert refused({"model": 5, "messages": USER}).param == "model"


def test_what_does_not_fit_the_context_is_refused() -> None:
    long = refused(chat(messages=[{"role": "user", "content": "x" * 58}]))
    assert (long.code, long.param) == ("context_length_exceeded", "messages")
    huge = refused(chat(messages=[{"role": "user", "content": "x" * 64 * 300}]))
    assert huge.code == "context_length_exceeded"
    for limit in (57, 10**30):
        beyond = refused(chat(max_tokens=limit))
        assert (beyond.code, beyond.param) == ("context_length_exceeded", "max_tokens")
    assert parse_chat(chat(max_tokens=56), MODEL).requests[0].sampling.max_tokens == 56


def test_limits_default_to_the_rest_of_the_context_and_to_16() -> None:
    assert parse_chat(chat(), MODEL).requests[0].sampling.max_tokens == 64 - len("<user>hi")
    assert parse_chat(chat(max_completion_tokens=5), MODEL).requests[0].sampling.max_tokens == 5
    completion = parse_completion({"model": "m", "prompt": "hi"}, MODEL)
    assert completion.requests[0].sampling.max_tokens == 16


def test_sampling_parameters_arrive() -> None:
    job = parse_chat(
        chat(temperature=0, top_p=0.5, top_k=0, min_p=0.1, seed=7, n=2, stop="x", stop_token_ids=[3]), MODEL
    )
    first, second = (request.sampling for request in job.requests)
    assert (first.temperature, first.top_p, first.top_k, first.min_p) == (0.0, 0.5, None, 0.1)
    assert (first.seed, first.choice, second.seed, second.choice) == (7, 0, 7, 1)
    assert (job.text.stop, first.stop_token_ids) == (("x",), (3,))
    assert len({request.request_id for request in job.requests}) == 2


def test_token_rules_arrive() -> None:
    fields = {
        "presence_penalty": 1,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"7": -100, "9": 2.5},
        "bad_words": ["ab", " c"],
        "allowed_token_ids": [7, 9],
        "min_tokens": 3,
        "skip_special_tokens": False,
    }
    job = parse_chat(chat(**fields), MODEL)
    sampling = job.requests[0].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -0.5)
    assert sampling.repetition_penalty == 1.2
    assert sampling.logit_bias == ((7, -100.0), (9, 2.5))
    assert sampling.bad_words == ((97, 98), (32, 97, 98), (32, 99))  # at a text's start and after a space
    assert sampling.allowed_token_ids == (7, 9)
    assert sampling.min_tokens == job.text.min_tokens == 3
    assert not job.text.skip_special_tokens
    untouched = parse_chat(chat(), MODEL).requests[0].sampling
    assert not untouched.has_penalties
    assert untouched.logit_bias == untouched.bad_words == untouched.allowed_token_ids == ()


def test_content_parts_and_returned_answers_are_understood() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "annotations": []}
    messages = [{"role": "developer", "content": parts}, answer]
    job = parse_chat(chat(messages=messages), MODEL)
    assert job.requests[0].prompt_token_ids == tuple(map(ord, "<system>ab<assistant>c"))


def test_tool_messages_reach_the_template_with_arguments_as_objects() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"}
    result = {"role": "tool", "tool_call_id": "c1", "content": "2"}
    rendered = [Message.model_validate(message).for_template() for message in (answer, result)]
    assert rendered[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert (rendered[0]["content"], rendered[0]["reasoning_content"]) == ("", "hm")
    assert rendered[1] == {"role": "tool", "content": "2", "tool_call_id": "c1"}


@pytest.mark.parametrize("arguments", ["[1]", "{", "[" * 100_000, "5"])
def test_arguments_that_are_no_object_are_refused(arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    error = refused(chat(messages=[{"role": "assistant", "tool_calls": [call]}]))
    assert "JSON object" in error.message


def test_ids_of_a_job_are_the_clients_and_those_of_its_choices_are_not() -> None:
    jobs = [parse_chat(chat(n=2), MODEL, "mine") for _ in range(2)]
    assert [job.id for job in jobs] == ["chatcmpl-mine"] * 2
    assert len({request.request_id for job in jobs for request in job.requests}) == 4


@pytest.mark.parametrize(
    ("prompt", "num_prompts"), [("ab", 1), (["ab", "c"], 2), ([5, 6], 1), ([[5], [6, 7], [8]], 3)]
)
def test_every_shape_of_a_prompt(prompt: Any, num_prompts: int) -> None:
    job = parse_completion({"model": "m", "prompt": prompt, "n": 2}, MODEL)
    assert len(job.requests) == 2 * num_prompts
    assert job.prompt_tokens == sum(len(r.prompt_token_ids) for r in job.requests) // 2


@pytest.mark.parametrize(
    "prompt", [[], "", [[]], [1, "a"], [1.5], {"a": 1}, [-1], [0x250], [[0x250]], True, ["a"] * 129]
)
def test_wrong_prompts_are_refused(prompt: Any) -> None:
    assert refused({"model": "m", "prompt": prompt}, parse_completion).status == 400


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "hi", **fields}


def test_logprobs_in_the_words_of_each_route() -> None:
    asked = parse_chat(chat(logprobs=True, top_logprobs=3), MODEL).requests[0].sampling
    assert (asked.logprobs, asked.prompt_logprobs) == (3, None)
    assert parse_chat(chat(logprobs=True), MODEL).requests[0].sampling.logprobs == 0
    assert parse_chat(chat(logprobs=False), MODEL).requests[0].sampling.logprobs is None
    asked = parse_completion(completion(logprobs=2), MODEL).requests[0].sampling
    assert (asked.logprobs, asked.prompt_logprobs) == (2, None)
    asked = parse_completion(completion(logprobs=2, echo=True), MODEL).requests[0].sampling
    assert (asked.logprobs, asked.prompt_logprobs) == (2, 2)
    assert refused(completion(logprobs=21), parse_completion).param == "logprobs"
    assert refused(completion(logprobs=True), parse_completion).param == "logprobs"


def test_echo_may_ask_for_nothing_but_the_prompt() -> None:
    job = parse_completion(completion(prompt=["ab", "c"], echo=True, max_tokens=0), MODEL)
    assert (job.echo, job.echo_only) == (("ab", "c"), True)
    assert {request.sampling.max_tokens for request in job.requests} == {1}
    assert "with echo" in refused(completion(max_tokens=0), parse_completion).message
    assert refused(chat(max_tokens=0)).param == "max_tokens"


def test_requests_may_control_their_speculation() -> None:
    def limit(**fields: Any) -> int | None:
        return parse_chat(chat(**fields), MODEL).requests[0].sampling.max_draft_tokens

    assert limit() is limit(speculation={}) is limit(speculation={"enabled": True}) is None
    assert limit(speculation={"max_tokens": 3}) == 3
    assert limit(speculation={"enabled": False, "max_tokens": 3}) == 0
    with pytest.raises(RequestError) as caught:
        parse_chat(chat(speculation={"enabled": False}), replace(MODEL, speculation_control=False))
    assert (caught.value.param, caught.value.code) == ("speculation", "unsupported_parameter")
    parse_chat(chat(), replace(MODEL, speculation_control=False))
