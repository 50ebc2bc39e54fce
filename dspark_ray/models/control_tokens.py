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
from functools import cached_property
from typing import Any

import tokenizers

from dspark_ray.core.errors import RequestError

# What an assistant's own text may hold: sent back as it came, with its thoughts and calls in it.
_SPOKEN_BY = ("assistant",)


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
        self._special = _pattern(special.values())
        self._all = _pattern((special | structural).values())

    def guard(self) -> "GuardedMessages":
        """For one conversation."""
        return GuardedMessages(self)

    def in_message(self, role: Any) -> re.Pattern[str]:
        """What a message of `role` must not write."""
        return self._special if role in _SPOKEN_BY else self._all

    def encode(self, rendered: str, restore: Callable[[str], str]) -> list[int]:
        """Tokens of a template's result: every control token in it is the template's own."""
        token_ids: list[int] = []
        start = 0
        encoding = self._backend.encode(rendered, add_special_tokens=False)
        for token_id, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self._ids:
                token_ids += [*self._encode_text(restore(rendered[start:begin])), token_id]
                start = end
        return token_ids + self._encode_text(restore(rendered[start:]))

    def _encode_text(self, text: str) -> list[int]:
        tokens = self._text_backend.encode(text, add_special_tokens=False).tokens
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

    def value(self, value: Any, pattern: re.Pattern[str] | None = None) -> Any:
        """Anything that goes into a template, with placeholders in its strings, keys included."""
        pattern = pattern or self._control.in_message(None)
        if isinstance(value, str):
            return pattern.sub(self._placeholder, value)
        if isinstance(value, Mapping):
            return {self.value(key, pattern): self.value(item, pattern) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item, pattern) for item in value]
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

    def _placeholder(self, match: re.Match[str]) -> str:
        self._found.append(match[0])
        return f"{self._name}x{len(self._found) - 1}x"


def _pattern(contents: Any) -> re.Pattern[str]:
    """Matches each of `contents`, the longest first; nothing where there are none."""
    ordered = sorted(set(contents), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
