"""Keeps what users write from becoming control tokens: a message cannot end its turn or open another role's.

A chat template mixes its own control tokens with the messages' text, and a tokenizer that reads the result
cannot tell whose `<|im_end|>` it sees. So control tokens in the messages are replaced by placeholders before
the template runs; those left in its result are its own. Between them, the text is restored and tokenised by
a tokenizer that knows no control tokens.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tokenizers

from dspark_ray.core.errors import RequestError

# What an assistant's own text may hold: sent back as it came, with its thoughts and calls in it.
_SPOKEN_BY = ("assistant",)


def encoding_of(
    backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool = False
) -> tokenizers.Encoding:
    """Raises `RequestError` for what is not Unicode."""
    try:
        return backend.encode(text, add_special_tokens=add_special_tokens)
    except (TypeError, UnicodeEncodeError) as error:
        raise RequestError(f"the text is not valid Unicode: {error}", code="invalid_text") from error


@dataclass(frozen=True, slots=True)
class Forbidden:
    """What some message must not write."""

    pattern: re.Pattern[str]
    token_ids: frozenset[int]

    @classmethod
    def of(cls, tokens: Mapping[int, str]) -> "Forbidden":
        """The longest first; nothing is found where there are none."""
        ordered = sorted(set(tokens.values()), key=len, reverse=True)
        return cls(re.compile("|".join(map(re.escape, ordered)) or r"(?!)"), frozenset(tokens))


class ControlTokens:
    """The control tokens of one tokenizer: its special ones, and added ones that its chat template writes."""

    def __init__(self, backend: tokenizers.Tokenizer, chat_template: str) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        special = {index: token.content for index, token in added.items() if token.special}
        structural = {
            index: token.content
            for index, token in added.items()
            if token.content.strip() and token.content in chat_template  # blank ones only shorten white space
        }
        self._ids = frozenset(special | structural)
        # Some are found in normalised text, where other characters than their own may spell them.
        self._has_other_spellings = backend.normalizer is not None and any(
            added[index].normalized for index in self._ids
        )
        self._special = Forbidden.of(special)
        self._all = Forbidden.of(special | structural)

    def guard(self) -> "GuardedMessages":
        """For one conversation."""
        return GuardedMessages(self)

    def in_message(self, role: Any) -> Forbidden:
        """What a message of `role` must not write."""
        return self._special if role in _SPOKEN_BY else self._all

    def has_other_spelling(self, text: str, forbidden: Forbidden) -> bool:
        """Whether one is still found in `text`, which writes none as it is."""
        if not self._has_other_spellings:
            return False
        found = encoding_of(self._backend, text).ids
        return not forbidden.token_ids.isdisjoint(found)

    def encode(self, rendered: str, restore: Callable[[str], str]) -> list[int]:
        """Tokens of a template's result: every control token in it is the template's own."""
        token_ids: list[int] = []
        start = 0
        encoding = encoding_of(self._backend, rendered)
        for token_id, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self._ids:
                token_ids += [*self._encode_text(restore(rendered[start:begin])), token_id]
                start = end
        return token_ids + self._encode_text(restore(rendered[start:]))

    def _encode_text(self, text: str) -> list[int]:
        tokens = encoding_of(self._text_backend, text).tokens
        known = (self._backend.token_to_id(token) for token in tokens)  # their numbers may differ
        token_ids = [token_id for token_id in known if token_id is not None]
        if not self._ids.isdisjoint(token_ids):
            raise RequestError(
                "this model's tokenizer has no other way to write the control tokens in these messages; "
                "leave them out",
                param="messages",
                code="invalid_text",
            )
        return token_ids

    @cached_property
    def _text_backend(self) -> tokenizers.Tokenizer:
        """The same vocabulary without control tokens. Two threads that both make it make the same."""
        fields = json.loads(self._backend.to_str())
        fields["added_tokens"] = [token for token in fields["added_tokens"] if token["id"] not in self._ids]
        fields["post_processor"] = None  # it may name tokens that are gone
        return tokenizers.Tokenizer.from_str(json.dumps(fields))


class GuardedMessages:
    """The control tokens found in one conversation, and their way back."""

    def __init__(self, control: ControlTokens) -> None:
        self._control = control
        self._name = secrets.token_hex(8)  # letters and digits only: templates leave it as it is
        self._found: list[str] = []

    def message(self, message: Any) -> Any:
        """`message` with placeholders."""
        role = message.get("role") if isinstance(message, Mapping) else None
        return self.value(message, self._control.in_message(role))

    def value(self, value: Any, forbidden: Forbidden | None = None) -> Any:
        """Anything that goes into a template, with placeholders in its strings, keys included."""
        forbidden = forbidden or self._control.in_message(None)
        if isinstance(value, str):
            marked = forbidden.pattern.sub(lambda match: self._placeholder(match[0]), value)
            hidden = self._control.has_other_spelling(marked, forbidden)
            return self._placeholder(value) if hidden else marked
        if isinstance(value, Mapping):
            return {self.value(key, forbidden): self.value(item, forbidden) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item, forbidden) for item in value]
        return value

    def encode(self, rendered: str) -> list[int] | None:
        """The tokens of what the template made of it; None if no message held a control token."""
        return self._control.encode(rendered, self.restore) if self._found else None

    def restore(self, text: str) -> str:
        """`text` with what was written."""
        restored = re.sub(f"{self._name}x([0-9]+)x", lambda match: self._found[int(match[1])], text)
        if self._name in restored:  # the template has cut a placeholder
            raise RequestError(
                "the model's chat template cannot take control tokens in messages; leave them out",
                param="messages",
                code="chat_template_error",
            )
        return restored

    def _placeholder(self, written: str) -> str:
        self._found.append(written)
        return f"{self._name}x{len(self._found) - 1}x"
