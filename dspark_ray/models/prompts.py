"""Prompts for offline work: any JSON-lines file, one object a line, in one of four shapes.

| key | value | becomes |
|---|---|---|
| `prompt_ids` | token ids | themselves (what the data generator writes) |
| `messages` | OpenAI messages | the chat template |
| `turns` | strings, user turns of a conversation | the first one, in the chat template |
| `prompt` | a string | plain text, as for `/v1/completions` |
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from dspark_ray.core.errors import ConfigError, RequestError
from dspark_ray.models.tokenizer import Tokenizer

SHAPES = ("prompt_ids", "messages", "turns", "prompt")
ROLES = ("system", "developer", "user", "assistant", "tool")

T = TypeVar("T")

OnBadLine = Callable[[str], None]
"""Called with what is wrong, file and line first, instead of an error; the line is then left out."""


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """One line of a prompts file, checked but not tokenised. Exactly one of the three is set."""

    line: int  # from 1
    token_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a prompts file in tokens."""

    line: int  # from 1
    token_ids: tuple[int, ...]


def read_raw_prompts(
    path: Path, limit: int | None = None, on_bad_line: OnBadLine | None = None
) -> list[RawPrompt]:
    """The first `limit` lines of a file; `ConfigError` names the line that is no prompt (or `on_bad_line` is
    told), or a file without any."""
    prompts: list[RawPrompt] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if limit is not None and len(prompts) >= limit:
                    break
                if line.strip():
                    _take(prompts, partial(_parse, line, path, number), on_bad_line)
    except OSError as error:
        raise ConfigError(f"cannot read the prompts file {path}: {error.strerror}") from error
    if not prompts:
        raise ConfigError(f"{path} holds no prompts")
    return prompts


def read_prompts(
    path: Path, tokenizer: Tokenizer, limit: int | None = None, on_bad_line: OnBadLine | None = None
) -> list[Prompt]:
    """The same in tokens; a line that the chat template refuses is a bad one, too."""
    prompts: list[Prompt] = []
    for raw in read_raw_prompts(path, limit, on_bad_line):
        _take(prompts, partial(_tokenise, raw, path, tokenizer), on_bad_line)
    return prompts


def _take(prompts: list[T], read: Callable[[], T], on_bad_line: OnBadLine | None) -> None:
    try:
        prompts.append(read())
    except ConfigError as error:
        if on_bad_line is None:
            raise
        on_bad_line(str(error))


def _tokenise(raw: RawPrompt, path: Path, tokenizer: Tokenizer) -> Prompt:
    try:
        if raw.messages is not None:
            ids = tokenizer.render_chat(list(raw.messages))
        else:
            ids = tokenizer.encode(raw.text) if raw.text is not None else list(raw.token_ids or ())
    except RequestError as error:
        raise ConfigError(f"{path}:{raw.line}: {error.message}") from error
    return Prompt(raw.line, tuple(ids))


def _parse(line: bytes, path: Path, number: int) -> RawPrompt:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}:{number} is not UTF-8: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}:{number} is not JSON: {error}") from error
    shape = next((key for key in SHAPES if isinstance(record, dict) and key in record), None)
    if shape is None:
        raise ConfigError(f"{path}:{number}: an object with one of {', '.join(SHAPES)} is needed")
    value = record[shape]
    if not value or not _fits(shape, value):
        raise ConfigError(f"{path}:{number}: {shape} is empty or has the wrong type")
    for role in [message.get("role") for message in value] if shape == "messages" else []:
        if role not in ROLES:
            raise ConfigError(f"{path}:{number}: role {role!r} is none of {', '.join(ROLES)}")
    match shape:
        case "prompt_ids":
            return RawPrompt(number, token_ids=tuple(value))
        case "prompt":
            return RawPrompt(number, text=value)
        case "turns":
            return RawPrompt(number, messages=({"role": "user", "content": value[0]},))
        case _:
            return RawPrompt(number, messages=tuple(value))


def _fits(shape: str, value: Any) -> bool:
    if shape == "prompt":
        return isinstance(value, str)
    kind: type = {"prompt_ids": int, "messages": dict, "turns": str}[shape]
    return isinstance(value, list) and all(type(item) is kind for item in value)
