"""Thoughts and tool calls are told apart from text, however the text is cut into deltas."""

import json
from typing import Any

import pytest

from dspark_ray.serving.reasoning import Reasoning, ReasoningSplit, reasoning_at
from dspark_ray.serving.tool_calls import ToolCallReader
from dspark_ray.serving.tools import HERMES, LLAMA, ToolFormat, format_of_template, with_tool_prompt

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": {"c": "}\\"{"}}}\n</tool_call>'
ARGUMENTS = {"a": 1, "b": {"c": '}"{'}}


def cut(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def split(text: str, start: Reasoning, size: int) -> tuple[str, str]:
    reader = ReasoningSplit(start)
    parts = [reader.push(piece, last=False) for piece in cut(text, size)] + [reader.push("", last=True)]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize(
    ("text", "start", "expected"),
    [
        ("<think>\nhm <b>\n\n</think>\n\nyes", Reasoning.POSSIBLE, ("hm <b>", "yes")),
        ("\n<think>hm</think>yes\n", Reasoning.POSSIBLE, ("hm", "yes\n")),
        ("no thoughts </think>", Reasoning.POSSIBLE, ("", "no thoughts </think>")),
        (" <thin", Reasoning.POSSIBLE, ("", " <thin")),
        ("\nhm</think>\nyes </think>", Reasoning.OPEN, ("hm", "yes </think>")),
        ("cut short</thi", Reasoning.OPEN, ("cut short</thi", "")),
        ("<think>x</think>", Reasoning.NONE, ("", "<think>x</think>")),
        ("", Reasoning.POSSIBLE, ("", "")),
    ],
)
def test_thoughts(text: str, start: Reasoning, expected: tuple[str, str], size: int) -> None:
    assert split(text, start, size) == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|im_start|>assistant\n", Reasoning.POSSIBLE),
        ("<|im_start|>assistant\n<think>\n", Reasoning.OPEN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Reasoning.NONE),
    ],
)
def test_where_an_answer_starts(prompt: str, expected: Reasoning) -> None:
    assert reasoning_at(prompt, thinks=True) is expected
    assert reasoning_at(prompt, thinks=False) is Reasoning.NONE


def read(text: str, tool_format: ToolFormat, size: int) -> tuple[str, list[tuple[str, str]]]:
    """Content, and name and arguments of each call."""
    reader = ToolCallReader(tool_format)
    content, calls = "", {}
    for piece in [*cut(text, size), None]:
        text, deltas = reader.push(piece or "", last=piece is None)
        content += text
        for delta in deltas:
            if delta.name is not None:
                assert delta.id is not None
                assert delta.index == len(calls)
                calls[delta.index] = (delta.name, "")
            name, arguments = calls[delta.index]
            calls[delta.index] = (name, arguments + delta.arguments)
    assert reader.num_calls == len(calls)
    return content, list(calls.values())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "tool_format", "content", "names"),
    [
        (CALL, HERMES, "", ["add"]),
        (f"Let me see. \n{CALL}\n{CALL}\n", HERMES, "Let me see.", ["add", "add"]),
        ("a < b, <tool_", HERMES, "a < b, <tool_", []),
        ("<tool_call> none", HERMES, "<tool_call>none", []),
        ('<tool_call>{"nam": 1}</tool_call>', HERMES, '<tool_call>{"nam": 1}</tool_call>', []),
        ("no call \n", HERMES, "no call \n", []),
        (CALL.removesuffix("\n</tool_call>"), HERMES, "", ["add"]),
        ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', HERMES, "", ["f"]),
        ('{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}', LLAMA, "", ["f", "g"]),
        ('  {"name": "f", "parameters": {}}', LLAMA, "", ["f"]),
        ('so {"name": "f", "parameters": {}}', LLAMA, 'so {"name": "f", "parameters": {}}', []),
        ('{"city": "Oslo"}', LLAMA, '{"city": "Oslo"}', []),
    ],
)
def test_calls(text: str, tool_format: ToolFormat, content: str, names: list[str], size: int) -> None:
    found, calls = read(text, tool_format, size)
    assert (found, [name for name, _ in calls]) == (content, names)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_arguments_come_as_they_were_written(size: int) -> None:
    (_, arguments), *_ = read(CALL, HERMES, size)[1]
    assert json.loads(arguments) == ARGUMENTS


def test_arguments_stream_before_they_are_complete() -> None:
    reader = ToolCallReader(HERMES)
    _, deltas = reader.push('<tool_call>{"name": "add", "arguments": {"a": "long te', last=False)
    assert [(delta.name, delta.arguments) for delta in deltas] == [("add", ""), (None, '{"a": "long te')]
    _, rest = reader.push("xt", last=True)
    assert [delta.arguments for delta in rest] == ["xt"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ tools }} <tool_call>", HERMES),
        ("{% if tools %} <|python_tag|> {% endif %}", LLAMA),
        ("{{ messages }}", HERMES),
    ],
)
def test_the_format_is_the_templates(template: str, expected: ToolFormat) -> None:
    assert format_of_template(template) is expected


def test_a_template_without_tools_gets_them_in_the_text() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    system, answer = with_tool_prompt(messages, tools)
    assert system["content"].startswith("Be brief.\n\n")
    assert '"name": "add"' in system["content"]
    assert read(answer["content"], HERMES, 1000)[1] == [("add", '{"a": 1}')]
    assert "tool_calls" not in answer
    assert with_tool_prompt(messages[1:], tools)[0]["role"] == "system"
