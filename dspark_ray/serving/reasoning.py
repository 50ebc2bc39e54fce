"""What a model thinks before it answers, told apart from the answer: `<think>` … `</think>`."""

from enum import Enum

THINK = "<think>"
END_THINK = "</think>"


class Reasoning(Enum):
    """Where a model's answer starts, in terms of its thoughts."""

    NONE = "none"  # the model does not think, or the prompt has closed its thoughts
    POSSIBLE = "possible"  # it may begin with <think>
    OPEN = "open"  # the prompt ends in <think>: the answer begins inside


def reasoning_at(prompt: str, *, thinks: bool) -> Reasoning:
    """By the end of a rendered prompt."""
    end = prompt.rstrip()
    if not thinks or end.endswith(END_THINK):
        return Reasoning.NONE
    return Reasoning.OPEN if end.endswith(THINK) else Reasoning.POSSIBLE


def held_back(text: str, marker: str) -> int:
    """Length of the longest end of `text` with which `marker` begins."""
    longest = min(len(marker) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)


class ReasoningSplit:
    """Streams text into (reasoning, content); what may be the beginning of a marker is held back."""

    def __init__(self, start: Reasoning) -> None:
        self._state = start
        self._held = ""
        self._trim = start is Reasoning.OPEN  # line breaks that separate marker and text belong to neither

    def push(self, text: str, *, last: bool) -> tuple[str, str]:
        """`last`: nothing follows, so nothing is held back."""
        text, self._held = self._held + text, ""
        if self._state is Reasoning.POSSIBLE:
            begun = text.lstrip()
            if not last and THINK.startswith(begun):
                self._held = text
                return "", ""
            opens = begun.startswith(THINK)
            self._state = Reasoning.OPEN if opens else Reasoning.NONE
            if opens:
                text, self._trim = begun.removeprefix(THINK), True
        if self._state is Reasoning.NONE:
            return "", self._trimmed(text)
        thoughts, marker, text = self._trimmed(text).partition(END_THINK)
        if marker:
            self._state, self._trim = Reasoning.NONE, True
            return thoughts.rstrip("\n"), self._trimmed(text)
        if not last:
            shown = thoughts[: len(thoughts) - held_back(thoughts, END_THINK)].rstrip("\n")
            self._held, thoughts = thoughts[len(shown) :], shown
        return thoughts, ""

    def _trimmed(self, text: str) -> str:
        if self._trim:
            text = text.lstrip("\n")
            self._trim = not text
        return text
