"""Tokens to text for one choice: stop strings, stop tokens and what counts as used."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from dspark_ray.core.types import FinishReason, RequestOutput, TextOptions


class ChatPrompt(Protocol):
    """A conversation in the model's chat template."""

    @property
    def text(self) -> str: ...

    @property
    def token_ids(self) -> list[int]: ...


class Tokenizer(Protocol):
    """What the routes need of a model's tokenizer. May take long for long texts: call it in a thread."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends an answer, the chat template's end of turn included."""
        ...

    @property
    def chat_template(self) -> str:
        """Its source; empty without one."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it."""
        ...

    def chat_prompt(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        control_tokens: bool = False,
    ) -> ChatPrompt:
        """The conversation in the model's chat template; raises `RequestError`.

        Control tokens that the messages write are text, unless `control_tokens`.
        """
        ...


class PushedText(Protocol):
    """What a detokenizer makes of the tokens of one step."""

    @property
    def text(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Tokens that count: fewer than pushed only when a stop string ended the text."""
        ...

    @property
    def stopped(self) -> bool: ...


class Detokenizer(Protocol):
    """One choice's text; never takes back what it returned."""

    @property
    def stopped(self) -> bool:
        """A stop string is complete; nothing follows."""
        ...

    def push(self, token_ids: Sequence[int]) -> PushedText: ...

    def flush(self) -> str:
        """What is still held back when the request has ended."""
        ...


NewDetokenizer = Callable[[TextOptions], Detokenizer]
"""A detokenizer for one choice."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one output adds to a choice."""

    text: str
    num_tokens: int
    finish_reason: FinishReason | None = None
    pieces: tuple[
        str, ...
    ] = ()  # the text by token, where the output has details; held-back text comes later


class ChoiceText:
    """Feeds the outputs of one choice to its detokenizer; stop conditions hold in emission order."""

    def __init__(self, detokenizer: Detokenizer, include_stop: bool) -> None:
        self._detokenizer = detokenizer
        self._include_stop = include_stop

    def add(self, output: RequestOutput) -> TextDelta:
        """The text of `output`; `finish_reason` is STOP as soon as a stop string is complete."""
        if output.details is not None and len(output.token_ids) > 1:
            return self._add_each(output)
        delta = self._add(output)
        return delta if output.details is None else replace(delta, pieces=(delta.text,))

    def _add_each(self, output: RequestOutput) -> TextDelta:
        """Token by token: the same text, and which token brought which part of it."""
        deltas: list[TextDelta] = []
        last = len(output.token_ids) - 1
        for index, token_id in enumerate(output.token_ids):
            reason = output.finish_reason if index == last else None
            deltas.append(self._add(replace(output, token_ids=(token_id,), finish_reason=reason)))
            if deltas[-1].finish_reason is not None:
                break
        pieces = tuple(delta.text for delta in deltas)
        num_tokens = sum(delta.num_tokens for delta in deltas)
        return TextDelta("".join(pieces), num_tokens, deltas[-1].finish_reason, pieces)

    def _add(self, output: RequestOutput) -> TextDelta:
        num_tokens = len(output.token_ids)
        # The token that stopped the engine (end of text or a stop token id) is counted and not shown.
        hidden = int(output.finish_reason is FinishReason.STOP and not self._include_stop)
        pushed = self._detokenizer.push(output.token_ids[: max(0, num_tokens - hidden)])
        if pushed.stopped:
            return TextDelta(pushed.text, pushed.num_tokens, FinishReason.STOP)
        if output.finish_reason is None:
            return TextDelta(pushed.text, num_tokens)
        text = pushed.text + self._detokenizer.flush()
        reason = FinishReason.STOP if self._detokenizer.stopped else output.finish_reason
        return TextDelta(text, num_tokens, reason)
