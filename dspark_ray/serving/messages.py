"""Chat messages as clients send them, and as chat templates take them."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from dspark_ray.serving.body import Body

# An answer sent back as it came carries these, empty; filled ones are refused.
_EMPTY_FIELDS = ("annotations", "audio", "function_call", "refusal")


class CalledFunction(Body):
    """`function` of a tool call: its arguments as the model wrote them."""

    name: str = Field(min_length=1, max_length=128)
    arguments: str = ""

    @model_validator(mode="after")
    def _check_arguments(self) -> "CalledFunction":
        self.parsed_arguments()
        return self

    def parsed_arguments(self) -> dict[str, Any]:
        """What templates take; `ValueError` for anything but a JSON object."""
        try:
            value = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError("arguments must be a JSON object, as a string") from error
        if not isinstance(value, dict):
            raise ValueError("arguments must be a JSON object, as a string")
        return value


class ToolCall(Body):
    """One entry of an assistant message's `tool_calls`."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


def _text_of_parts(content: Any) -> Any:
    """A list of text parts as one string; anything else is left to the type check."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text"):
            raise ValueError(f"only content parts of type 'text' are supported, got {str(kind)[:64]!r}")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"a content part of type '{kind}' needs a string 'text'")
        texts.append(part["text"])
    return "".join(texts)


Content = Annotated[str, BeforeValidator(_text_of_parts)]


class Message(Body):
    """One chat message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list, max_length=128)
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_fields(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            key: item
            for key, item in value.items()
            if item is not None and not (key in _EMPTY_FIELDS and item == [])
        }

    @model_validator(mode="after")
    def _check_role(self) -> "Message":
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content is not None):
            raise ValueError("tool_calls and reasoning_content belong to messages of role 'assistant'")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of role 'tool' needs its tool_call_id")
        if self.content is None and not self.tool_calls:
            raise ValueError(f"a message of role '{self.role}' needs content")
        return self

    @property
    def num_chars(self) -> int:
        calls = sum(len(call.function.name) + len(call.function.arguments) for call in self.tool_calls)
        return len(self.content or "") + len(self.reasoning_content or "") + calls

    def for_template(self) -> dict[str, Any]:
        """The message in the words of chat templates: arguments as objects, developers as system."""
        role = "system" if self.role == "developer" else self.role
        fields: dict[str, Any] = {"role": role, "content": self.content or ""}
        for name in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                fields[name] = value
        if self.tool_calls:
            fields["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.parsed_arguments()},
                }
                for call in self.tool_calls
            ]
        return fields


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """All of a conversation."""
    return [message.for_template() for message in messages]
