"""Tools: what clients offer, and how each model family writes its calls (serving/tool_calls.py reads them).

| format | one call |
|---|---|
| `hermes` (Qwen, Hermes) | `<tool_call>{"name": …, "arguments": {…}}</tool_call>` |
| `llama` | `{"name": …, "parameters": {…}}` as the whole answer; several are separated by `;` |
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dspark_ray.serving.body import Body
from dspark_ray.serving.constraints import Format, json_format

MAX_TOOLS = 128


class FunctionSpec(Body):
    """`function` of a tool."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """One entry of `tools`."""

    type: Literal["function"]
    function: FunctionSpec

    def for_template(self) -> dict[str, Any]:
        """As chat templates and models know it."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        function["parameters"] = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class NamedFunction(Body):
    """`function` of a `tool_choice`."""

    name: str


class NamedTool(Body):
    """A `tool_choice` that names its function."""

    type: Literal["function"]
    function: NamedFunction


class ToolFields(Body):
    """The parameters about tools."""

    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _check_choice(self) -> "ToolFields":
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError("two tools have the same name")
        choice = self.tool_choice
        if not names and choice not in (None, "none", "auto"):
            raise ValueError("tool_choice asks for a tool, and there are no tools")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ValueError(
                f"tool_choice names {choice.function.name[:128]!r}, which is not among the tools"
            )
        return self

    @property
    def tools_offered(self) -> list[Tool]:
        """The tools that may be called."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def tools_demanded(self) -> list[Tool]:
        """Tools of which one must be called; empty: calling is up to the model."""
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.tools if tool.function.name == self.tool_choice.function.name]
        return self.tools if self.tool_choice == "required" else []


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model family writes a call: `begin` + name + `middle` + arguments + `end`."""

    name: str
    opening: str  # what a call starts with, for who reads it; empty: a `{` at the beginning of the answer
    begin: str
    middle: str
    end: str
    separator: str

    def demanded(self, tools: Sequence[Tool], *, parallel: bool) -> Format:
        """The constraint under which at least one of `tools` is called, and nothing else is said."""
        return {
            "type": "tags_with_separator",
            "tags": [self._tag(tool) for tool in tools],
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": not parallel,
        }

    def checked(self, tools: Sequence[Tool], *, parallel: bool) -> Format | None:
        """The constraint under which the model may say what it likes, and calls of `tools` follow their
        schemas; None if no tool is `strict`, or where a call has no opening that tells it from text."""
        if not self.opening or not any(tool.function.strict for tool in tools):
            return None
        return {
            "type": "triggered_tags",
            "triggers": [self.opening],
            "tags": [self._tag(tool) for tool in tools],
            "at_least_one": False,
            "stop_after_first": not parallel,
        }

    def _tag(self, tool: Tool) -> Format:
        parameters = tool.function.parameters or {"type": "object", "properties": {}}
        return {
            "type": "tag",
            "begin": self.begin + tool.function.name + self.middle,
            "content": json_format(parameters),
            "end": self.end,
        }


HERMES = ToolFormat(
    name="hermes",
    opening="<tool_call>",
    begin='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    end="}\n</tool_call>",
    separator="\n",
)
LLAMA = ToolFormat(
    name="llama", opening="", begin='{"name": "', middle='", "parameters": ', end="}", separator="; "
)
TOOL_FORMATS = {tool_format.name: tool_format for tool_format in (HERMES, LLAMA)}


def format_of_template(template: str) -> ToolFormat:
    """The format that a chat template teaches its model; hermes where it says nothing of tools."""
    if HERMES.opening in template or "tools" not in template:
        return HERMES
    return LLAMA if "<|python_tag|>" in template or '"parameters"' in template else HERMES


def with_tool_prompt(messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation for a template that knows no tools: they are explained in the system message,
    and earlier calls stand in the text as the model would write them."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    explained = (
        "You can call these functions, one JSON object each:\n"
        f"{listed}\n"
        "To call one, write its name and its arguments as JSON between tags, and nothing else:\n"
        '<tool_call>\n{"name": "<function>", "arguments": {}}\n</tool_call>'
    )
    spoken = [_with_spoken_calls(message) for message in messages]
    if not tools:
        return spoken
    if spoken and spoken[0]["role"] == "system":
        first = spoken[0]
        return [{**first, "content": f"{first['content']}\n\n{explained}"}, *spoken[1:]]
    return [{"role": "system", "content": explained}, *spoken]


def _with_spoken_calls(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = [
        HERMES.begin
        + call["function"]["name"]
        + HERMES.middle
        + json.dumps(call["function"]["arguments"], ensure_ascii=False)
        + HERMES.end
        for call in message["tool_calls"]
    ]
    content = HERMES.separator.join([message["content"], *calls] if message["content"] else calls)
    return {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": content}
