"""`POST /v1/responses`: the text core of the Responses API, as a chat request.

Nothing is stored: what belongs to stored responses (`previous_response_id`, `conversation`, `background`) is
refused by name.
"""

from typing import Any, Literal

from pydantic import Field

from dspark_ray.core.errors import RequestError
from dspark_ray.serving.body import Body, validate

_PASSED_ON = (
    "model", "temperature", "top_p", "parallel_tool_calls", "stream", "user", "metadata", "prompt_cache_key",
    "prompt_cache_retention", "safety_identifier", "service_tier", "chat_template_kwargs", "top_k", "min_p",
    "seed", "deterministic",
)  # fmt: skip
"""Parameters that mean the same in a chat request, and are checked there."""

# Known, and accepted at these values only; null always is.
_NO_OP_VALUES: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({},),
    "store": (False,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


class TextFormat(Body):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    description: str | None = None


class TextConfig(Body):
    """`text`."""

    format: TextFormat = TextFormat()
    verbosity: Literal["medium"] | None = None


class FunctionTool(Body):
    """A tool: the function's fields stand in the tool itself."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunctionTool(Body):
    """A `tool_choice` that names its function."""

    type: Literal["function"]
    name: str


class ResponseFields(Body):
    """What is read here; the rest goes on to the chat request."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextConfig = TextConfig()
    tools: list[FunctionTool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None


def as_chat(body: dict[str, Any]) -> tuple[ResponseFields, dict[str, Any]]:
    """What is answered, and the chat request that asks for it. Raises `RequestError`."""
    present = {name: value for name, value in body.items() if value is not None}
    for name, no_ops in _NO_OP_VALUES.items():
        if name in present and present.pop(name) not in no_ops:
            raise RequestError(
                f"parameter '{name}' is not supported by this server; leave it out",
                param=name,
                code="unsupported_parameter",
            )
    chat = {name: present.pop(name) for name in _PASSED_ON if name in present}
    fields = validate(ResponseFields, present)
    chat["messages"] = _messages(fields)
    chat["max_completion_tokens"] = fields.max_output_tokens
    chat["response_format"] = _response_format(fields.text.format)
    if fields.tools:
        chat["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in fields.tools
        ]
    choice = fields.tool_choice
    chat["tool_choice"] = choice
    if isinstance(choice, NamedFunctionTool):
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    return fields, chat


def _response_format(text: TextFormat) -> dict[str, Any]:
    if text.type != "json_schema":
        return {"type": text.type}
    schema = {"name": text.name or "schema", "schema": text.schema_ or {}, "strict": text.strict}
    return {"type": "json_schema", "json_schema": schema}


def _messages(fields: ResponseFields) -> list[Any]:
    """Input items as chat messages: thoughts and calls belong to the assistant's message they stand by."""
    messages: list[Any] = []
    if fields.instructions is not None:
        messages.append({"role": "system", "content": fields.instructions})
    items = fields.input
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    thoughts: str | None = None
    for item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            thoughts = _thoughts(item)
            continue
        if kind == "message":
            message = {k: v for k, v in item.items() if k in ("role", "content")}
        elif kind == "function_call":
            call = {"name": item.get("name"), "arguments": item.get("arguments")}
            message = {
                "role": "assistant",
                "tool_calls": [{"id": item.get("call_id"), "type": "function", "function": call}],
            }
        elif kind == "function_call_output":
            message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
        else:
            raise RequestError(
                f"input items of type {str(kind)[:64]!r} are not supported",
                param="input",
                code="invalid_value",
            )
        if kind == "function_call" and messages and messages[-1].get("role") == "assistant":
            last = messages[-1]
            messages[-1] = {**last, "tool_calls": [*last.get("tool_calls", []), *message["tool_calls"]]}
            continue
        if thoughts is not None and message.get("role") == "assistant":
            message["reasoning_content"] = thoughts
        thoughts = None
        messages.append(message)
    return messages


def _thoughts(item: dict[str, Any]) -> str | None:
    parts = item.get("content")
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "".join(text for text in texts if isinstance(text, str)) or None
