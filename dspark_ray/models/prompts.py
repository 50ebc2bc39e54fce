"""Prompts for offline work: any JSON-lines file, one object a line, in one of four shapes.

| key | value | becomes |
|---|---|---|
| `prompt_ids` | token ids | themselves (what the data generator writes) |
| `messages` | OpenAI messages | the chat template |
| `turns` | strings, user turns of a conversation | the first one, in the chat template |
| `prompt` | a string | plain text, as for `/v1/completions` |
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_ray.core.errors import ConfigError, RequestError
from dspark_ray.models.tokenizer import Tokenizer

SHAPES = ("prompt_ids", "messages", "turns", "prompt")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a prompts file."""

    line: int  # from 1
    token_ids: tuple[int, ...]


def read_prompts(path: Path, tokenizer: Tokenizer, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a file; `ConfigError` names the line that is not one, or an empty file."""
    prompts: list[Prompt] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if limit is not None and len(prompts) >= limit:
                    break
                if line.strip():
                    prompts.append(Prompt(number, _parse(line, tokenizer)))
    except OSError as error:
        raise ConfigError(f"cannot read the prompts file {path}: {error.strerror}") from error
    except (ValueError, RequestError) as error:  # JSON and UTF-8 errors are ValueErrors
        raise ConfigError(f"{path}, prompt {len(prompts) + 1}: {error}") from error
    if not prompts:
        raise ConfigError(f"{path} holds no prompts")
    return prompts


def _parse(line: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    record = json.loads(line)
    shape = next((key for key in SHAPES if isinstance(record, dict) and key in record), None)
    if shape is None:
        raise ValueError(f"an object with one of {', '.join(SHAPES)} is needed")
    value = record[shape]
    if not value or not _fits(shape, value):
        raise ValueError(f"{shape} is empty or has the wrong type")
    if shape == "prompt_ids":
        return tuple(value)
    if shape == "prompt":
        return tuple(tokenizer.encode(value))
    messages = value if shape == "messages" else [{"role": "user", "content": value[0]}]
    return tuple(tokenizer.render_chat(messages))


def _fits(shape: str, value: Any) -> bool:
    if shape == "prompt":
        return isinstance(value, str)
    kind: type = {"prompt_ids": int, "messages": dict, "turns": str}[shape]
    return isinstance(value, list) and all(type(item) is kind for item in value)
