"""Reads tool calls out of a model's text while it comes: names at once, arguments as they grow."""

import json
import re
import uuid
from dataclasses import dataclass
from enum import Enum, auto

from dspark_ray.serving.reasoning import held_back
from dspark_ray.serving.tools import ToolFormat

END_CALL = "</tool_call>"
_HEADER = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL
)


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What a text adds to one call; `id` and `name` come once, at its start."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


class _Call:
    """One call: a JSON object with a name and arguments, from its first brace to its last."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._depth = 0
        self._in_string = self._escaped = False
        self._closings: list[int] = []  # where a value inside the object ended
        self._num_sent = 0  # characters of `text` that need no more looking at: header and sent arguments
        self.text = ""
        self.started = False  # its name is out
        self.complete = False

    def push(self, text: str) -> tuple[list[CallDelta], str]:
        """What is new, and the text behind the object's end."""
        for offset, char in enumerate(text):
            self._scan(char, len(self.text) + offset)
            if self.complete:
                self.text += text[: offset + 1]
                return self._deltas(), text[offset + 1 :]
        self.text += text
        return self._deltas(), ""

    def _scan(self, char: str, place: int) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 1:
                self._closings.append(place)
            self.complete = self._depth == 0

    def _deltas(self) -> list[CallDelta]:
        deltas = []
        if not self.started:
            header = _HEADER.match(self.text)
            if header is None:
                return self._whole() if self.complete else []
            self.started, self._num_sent = True, header.end()
            self._closings = [place for place in self._closings if place >= header.end()]
            name = json.loads(header.group(1), strict=False)
            deltas.append(CallDelta(self._index, "", _new_call_id(), name))
        end = self._closings[0] + 1 if self._closings else len(self.text)
        if end > self._num_sent:
            deltas.append(CallDelta(self._index, self.text[self._num_sent : end]))
            self._num_sent = end
        return deltas

    def _whole(self) -> list[CallDelta]:
        """A complete object whose keys stand in another order; nothing if it is no call."""
        try:
            value = json.loads(self.text, strict=False)
        except (ValueError, RecursionError):
            return []
        arguments = value.get("arguments", value.get("parameters"))
        if not isinstance(value.get("name"), str) or not isinstance(arguments, dict):
            return []
        self.started = True
        written = json.dumps(arguments, ensure_ascii=False)
        return [CallDelta(self._index, written, _new_call_id(), value["name"])]


class _State(Enum):
    TEXT = auto()
    CALL = auto()
    AFTER = auto()  # behind a call's object, before the text goes on


class ToolCallReader:
    """Streams text into (content, calls). What turns out to be no call is content, as it was written."""

    def __init__(self, tool_format: ToolFormat) -> None:
        self._opening = tool_format.opening
        self._state = _State.TEXT
        self._call = _Call(0)
        self._held = ""
        self._spoke = False  # there was content: without an opening tag, no call follows
        self.num_calls = 0

    def push(self, text: str, *, last: bool) -> tuple[str, list[CallDelta]]:
        """`last`: nothing follows, so nothing is held back."""
        self._held += text
        content: list[str] = []
        deltas: list[CallDelta] = []
        step = {
            _State.TEXT: self._read_text,
            _State.CALL: self._read_call,
            _State.AFTER: self._read_after,
        }
        while step[self._state](content, deltas, last):
            pass
        return "".join(content), deltas

    def _read_text(self, content: list[str], deltas: list[CallDelta], last: bool) -> bool:
        """Each of these returns whether another state goes on with what is held."""
        text = self._held.lstrip() if self.num_calls else self._held
        start = self._find_call(text)
        if start is not None:
            content.append(text[:start].rstrip())
            self._held = text[start + len(self._opening) :]
            self._call, self._state = _Call(self.num_calls), _State.CALL
            return True
        shown = text
        if not last:  # space before a call belongs to neither
            shown = text[: len(text) - held_back(text, self._opening)].rstrip()
        self._held = text[len(shown) :]
        self._spoke = self._spoke or bool(shown.strip())
        content.append(shown)
        return False

    def _find_call(self, text: str) -> int | None:
        if self._opening:
            return start if (start := text.find(self._opening)) >= 0 else None
        begun = text.lstrip()
        return len(text) - len(begun) if begun.startswith("{") and not self._spoke else None

    def _read_call(self, content: list[str], deltas: list[CallDelta], last: bool) -> bool:
        if not self._call.text:
            self._held = self._held.lstrip()
            if self._held and not self._held.startswith("{"):
                return self._give_up(content)
        new, self._held = self._call.push(self._held)
        deltas += new
        self.num_calls += any(delta.name is not None for delta in new)
        if self._call.complete:
            if not self._call.started:
                return self._give_up(content)
            self._state = _State.AFTER
            return True
        if last and not self._call.started:
            self._give_up(content)
        return False

    def _give_up(self, content: list[str]) -> bool:
        content.append(self._opening + self._call.text)
        self._state, self._spoke = _State.TEXT, True
        return True

    def _read_after(self, content: list[str], deltas: list[CallDelta], last: bool) -> bool:
        if not self._opening:
            text = self._held.lstrip(" \n\t;")
        else:
            text = self._held.lstrip()
            if text.startswith(END_CALL):
                text = text.removeprefix(END_CALL)
            elif END_CALL.startswith(text) and not last:
                self._held = text
                return False
        self._held = text
        if not text and not last and not self._opening:
            return False
        self._state = _State.TEXT
        return True


def _new_call_id() -> str:
    return "call_" + uuid.uuid4().hex[:24]
