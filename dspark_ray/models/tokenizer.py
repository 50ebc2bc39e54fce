"""Text to tokens and back: chat templates in, text that is safe to stream out.

tokenizer = Tokenizer.load(model_dir)
prompt = tokenizer.render_chat([{"role": "user", "content": "Hello"}])
detokenizer = IncrementalDetokenizer(tokenizer, stop=["###"])
delta = detokenizer.push(output.token_ids)  # once a step; flush() at the end
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dspark_ray.core.errors import ConfigError, RequestError
from dspark_ray.core.types import TextOptions
from dspark_ray.models.control_tokens import ControlTokens, encoding_of

# End-of-turn tokens: chat models whose configs name only the end of text still stop at their template's.
_END_OF_TURN_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")

# Names in chat_template_kwargs that would be taken for arguments of the call, or that the server sets.
_TEMPLATE_ARGUMENTS = frozenset(
    {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
)

_REPLACEMENT = "\ufffd"  # what an incomplete or invalid byte sequence decodes to
_MAX_PENDING_TOKENS = 8  # a character takes 4 bytes: more undecodable tokens than this are not one
_MAX_CHARACTER_TOKENS = 3  # tokens that an incomplete character can span


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation in the model's chat template."""

    text: str
    token_ids: list[int]


class Tokenizer:
    """A model's own tokenizer. Safe to use from several threads at once: it keeps no state."""

    def __init__(self, hf_tokenizer: Any, eos_token_ids: tuple[int, ...]) -> None:
        self._hf = hf_tokenizer
        self._backend = hf_tokenizer.backend_tokenizer
        self._control = ControlTokens(self._backend, str(hf_tokenizer.chat_template or ""))
        self.eos_token_ids = eos_token_ids
        self.special_ids = frozenset(
            index for index, token in hf_tokenizer.added_tokens_decoder.items() if token.special
        )

    @classmethod
    def load(cls, model_dir: Path) -> "Tokenizer":
        """From a model directory, without its code and without the network; `ConfigError` if it has none."""
        try:
            hf_tokenizer = AutoTokenizer.from_pretrained(
                model_dir, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ConfigError(f"cannot load a tokenizer from {model_dir}: {error}") from error
        if not hasattr(hf_tokenizer, "backend_tokenizer"):
            raise ConfigError(f"the tokenizer in {model_dir} has no tokenizer.json; convert it first")
        return cls(hf_tokenizer, _eos_token_ids(model_dir, hf_tokenizer))

    @property
    def vocab_size(self) -> int:
        """Tokens the tokenizer knows, added ones included; the model's embedding may have more rows."""
        return len(self._hf)

    @property
    def has_chat_template(self) -> bool:
        return self._hf.chat_template is not None

    @property
    def chat_template(self) -> str:
        """The template's source; empty without one."""
        return str(self._hf.chat_template or "")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a plain prompt, with the tokens the model wants at its start (BOS), if any."""
        # The backend is called directly: transformers' wrapper sets truncation on it, which two threads
        # must not do at once.
        return list(encoding_of(self._backend, text, add_special_tokens=add_special_tokens).ids)

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it; ids it does not know are empty."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def render_chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """The token ids of `chat_prompt`."""
        return self.chat_prompt(messages, add_generation_prompt=add_generation_prompt).token_ids

    def chat_prompt(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        control_tokens: bool = False,
    ) -> ChatPrompt:
        """A conversation in the model's chat template, which runs in a sandbox.

        `template_kwargs` are variables of the template, e.g. `enable_thinking`. Control tokens that the
        messages write are text, unless `control_tokens`. Raises `RequestError` when the template refuses the
        messages (roles out of order, a missing field) or there is no template.
        """
        if control_tokens:
            text = self._rendered(messages, tools, add_generation_prompt, dict(template_kwargs or {}))
            return ChatPrompt(text, self.encode(text, add_special_tokens=False))
        guard = self._control.guard()
        text = self._rendered(
            [guard.message(message) for message in messages],
            None if tools is None else guard.value(tools),
            add_generation_prompt,
            guard.value(dict(template_kwargs or {})),
        )
        token_ids = guard.encode(text)
        if token_ids is None:
            return ChatPrompt(text, self.encode(text, add_special_tokens=False))
        return ChatPrompt(guard.restore(text), token_ids)

    def _rendered(
        self,
        messages: list[Any],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        extra: dict[str, Any],
    ) -> str:
        if not self.has_chat_template:
            raise RequestError(
                "this model has no chat template; use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        if taken := sorted(extra.keys() & _TEMPLATE_ARGUMENTS):
            raise RequestError(
                f"chat_template_kwargs must not set {taken[0]!r}: the server does",
                param="chat_template_kwargs",
                code="invalid_value",
            )
        try:
            return str(
                self._hf.apply_chat_template(
                    messages,
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **extra,
                )
            )
        except Exception as error:  # a template may do anything with values it does not expect
            raise RequestError(
                f"the model's chat template refused the messages: {str(error)[:256]}",
                param="messages",
                code="chat_template_error",
            ) from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all tokens at once; ids the tokenizer does not know are left out."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def detokenizer(self, options: TextOptions) -> "IncrementalDetokenizer":
        """A detokenizer for one choice."""
        return IncrementalDetokenizer(
            self,
            stop=options.stop,
            include_stop_str_in_output=options.include_stop,
            skip_special_tokens=options.skip_special_tokens,
            min_tokens=options.min_tokens,
        )


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one push adds to the visible text."""

    text: str
    num_tokens: int  # of the pushed ones that count: fewer than pushed only when a stop string ended the text
    stopped: bool  # a stop string is complete; nothing follows


class IncrementalDetokenizer:
    """Turns one request's output tokens into text that can be sent at once and is never taken back.

    Held back are an incomplete character and text that may be the beginning of a stop string. All deltas
    and the flush together are `decode(all tokens)`, unless a stop string ends the text first.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """A stop string that is complete within the first `min_tokens` tokens is ordinary text."""
        assert all(stop), "an empty stop string would stop everything"
        self._pieces = _PieceStream(tokenizer, skip_special_tokens)
        self._stop = tuple(stop)
        self._include_stop = include_stop_str_in_output
        self._min_tokens_left = min_tokens
        self._held = ""  # decoded, but possibly the beginning of a stop string
        self.stopped = False

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Takes the tokens of one step in emission order; the first complete stop string ends the text."""
        if self.stopped:
            return TextDelta("", 0, True)
        text = ""
        for num_tokens, token_id in enumerate(token_ids, start=1):
            text += self._release(self._pieces.push(token_id))
            self._min_tokens_left -= 1
            if self.stopped:
                return TextDelta(text, num_tokens, True)
        return TextDelta(text, len(token_ids), False)

    def flush(self) -> str:
        """What is still held back when the request has ended. `stopped` may turn true here."""
        if self.stopped:
            return ""
        text = self._release(self._pieces.flush()) + self._held
        self._held = ""
        return text

    def _release(self, piece: str) -> str:
        """The text that `piece` makes safe to show."""
        text = self._held + piece
        match = _first_stop(text, self._stop)
        if match is not None and self._min_tokens_left > 0:
            self._held = ""
            return text
        if match is not None:
            start, end = match
            self.stopped, self._held = True, ""
            return text[: end if self._include_stop else start]
        num_held = _num_held_chars(text, self._stop)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


class _PieceStream:
    """Tokens to text, character by whole character.

    A token's text depends on its neighbours (bytes of one character, a leading space), so each token is
    decoded in a short window: the last piece's tokens as context, then the tokens not shown yet. The
    window moves on when its text ends in a complete character.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._vocab_size = tokenizer.vocab_size  # a model's ids above it are padding of its embedding
        self._window: list[int] = []
        self._num_context = 0  # tokens at the window's start that are context
        self._num_shown = 0  # characters of the window's text that are already out

    def push(self, token_id: int) -> str:
        # One token at a time: a byte-fallback tokenizer decodes a run of bytes that ends inside a
        # character to nothing but replacement characters, the complete ones before it included.
        if token_id >= self._vocab_size or token_id in self._skipped_ids:
            return ""  # without text; kept out of the window, which it would separate from its context
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT):
            return self._give_up_on_old_bytes(text)
        piece = text[self._num_shown :]
        if piece:
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            self._num_shown = len(self._decode(self._window))
        return piece

    def flush(self) -> str:
        piece = self._decode(self._window)[self._num_shown :]
        self._window, self._num_context, self._num_shown = [], 0, 0
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _give_up_on_old_bytes(self, text: str) -> str:
        """Shows undecodable bytes that no later token can complete, so that the window stays short."""
        if len(self._window) - self._num_context <= _MAX_PENDING_TOKENS:
            return ""
        cut = len(self._window) - _MAX_CHARACTER_TOKENS
        before = self._decode(self._window[:cut])
        # Only where the two halves decode as they do together is the cut not inside a character.
        if before + self._decode(self._window[cut:]) != text:
            return ""
        piece = before[self._num_shown :]
        self._window, self._num_context, self._num_shown = self._window[cut:], 0, 0
        return piece


def _first_stop(text: str, stop: Sequence[str]) -> tuple[int, int] | None:
    """Start and end of the stop string that is complete first (of those, the longest); None without one."""
    ends = [(start + len(s), start) for s in stop if (start := text.find(s)) >= 0]
    if not ends:
        return None
    end, start = min(ends)
    return start, end


def _num_held_chars(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` with which a stop string begins."""
    longest = max((len(s) - 1 for s in stop), default=0)
    for num_chars in range(min(longest, len(text)), 0, -1):
        if any(s.startswith(text[-num_chars:]) for s in stop):
            return num_chars
    return 0


def _eos_token_ids(model_dir: Path, hf_tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends an answer: by the configs, the tokenizer and the chat template."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        if path.is_file():
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            found |= set(value if isinstance(value, list) else [] if value is None else [value])
    if hf_tokenizer.eos_token_id is not None:
        found.add(hf_tokenizer.eos_token_id)
    template = str(hf_tokenizer.chat_template or "")
    vocabulary = hf_tokenizer.get_vocab()
    found |= {vocabulary[token] for token in _END_OF_TURN_TOKENS if token in template and token in vocabulary}
    return tuple(sorted(found))
