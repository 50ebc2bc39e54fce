"""One choice's text, told apart into thoughts, content and tool calls as it comes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dspark_ray.core.types import FinishReason, RequestUsage
from dspark_ray.serving.logprobs import ShownToken
from dspark_ray.serving.reasoning import Reasoning, ReasoningSplit
from dspark_ray.serving.tool_calls import CallDelta, ToolCallReader
from dspark_ray.serving.tools import ToolFormat


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What a text adds."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """What one output adds to a choice; the last one carries the finish reason and the usage."""

    index: int
    delta: AnswerDelta
    num_tokens: int
    finish_reason: FinishReason | None = None
    usage: RequestUsage | None = None
    tokens: tuple[ShownToken, ...] = ()  # with log-probabilities only, if they were asked for
    speculation: dict[str, Any] | None = None  # where the request asks for `speculation_details`


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """What to look for in a choice's text."""

    reasoning: Reasoning = Reasoning.NONE
    tool_format: ToolFormat | None = None  # None: no tools were offered
    named_tool: bool = False  # the client has named the tool to call

    def reader(self) -> "AnswerReader":
        return AnswerReader(self)


PLAIN_TEXT = AnswerShape()


class AnswerReader:
    """Feed it a choice's text in order; `last` with the end."""

    def __init__(self, shape: AnswerShape) -> None:
        self._shape = shape
        self._thoughts = None if shape.reasoning is Reasoning.NONE else ReasoningSplit(shape.reasoning)
        self._calls = None if shape.tool_format is None else ToolCallReader(shape.tool_format)

    def push(self, text: str, *, last: bool) -> AnswerDelta:
        reasoning = ""
        calls: list[CallDelta] = []
        if self._thoughts is not None:
            reasoning, text = self._thoughts.push(text, last=last)
        if self._calls is not None:
            text, calls = self._calls.push(text, last=last)
        return AnswerDelta(text, reasoning, tuple(calls))

    def finish_reason(self, reason: FinishReason) -> FinishReason:
        """In the words of the API: an answer that stopped after calls stopped to have them carried out."""
        called = self._calls is not None and self._calls.num_calls > 0
        stopped = reason is FinishReason.STOP and not self._shape.named_tool
        return FinishReason.TOOL_CALLS if called and stopped else reason


class Answer:
    """A whole choice, put together from its deltas."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[list[CallDelta]] = []
        self.tokens: list[ShownToken] = []

    def add(self, delta: AnswerDelta, tokens: Sequence[ShownToken] = ()) -> None:
        self.tokens += tokens
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        for call in delta.calls:
            if call.index == len(self._calls):
                self._calls.append([])
            self._calls[call.index].append(call)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[CallDelta]:
        """Whole calls: name, id and all arguments of each."""
        return [
            CallDelta(
                index,
                "".join(delta.arguments for delta in deltas),
                next(delta.id for delta in deltas if delta.id is not None),
                next(delta.name for delta in deltas if delta.name is not None),
            )
            for index, deltas in enumerate(self._calls)
        ]
