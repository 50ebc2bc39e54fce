"""Training samples as JSON lines: {"prompt_ids": [...], "response_ids": [...], "temperature": t}.

Files may grow while they are read: a reader continues where it stopped, and an unfinished last line waits.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

MIN_RESPONSE = 2  # tokens: an anchor and a label


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt (chat template included) and the target's own answer, final end-of-turn token included."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    temperature: float


@dataclass(frozen=True, slots=True)
class ReadResult:
    """What a file held after `start_byte`; `next_byte` is where to continue."""

    samples: list[Sample]
    offsets: list[int]  # the byte at which each sample's line starts
    errors: list[str]  # "file:line: reason", one per bad line
    next_byte: int


def parse_sample(line: bytes, *, vocab_size: int, max_length: int) -> Sample:
    """One line checked; raises ValueError with the reason a user can act on."""
    record = json.loads(line.decode("utf-8"))
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    prompt, response = (_token_ids(record, key, vocab_size) for key in ("prompt_ids", "response_ids"))
    if not prompt:
        raise ValueError("prompt_ids is empty")
    if len(response) < MIN_RESPONSE:
        raise ValueError("response_ids needs at least two tokens: an anchor and a label")
    if len(prompt) + MIN_RESPONSE > max_length:
        raise ValueError(f"the prompt alone has {len(prompt)} tokens, max_length is {max_length}")
    return Sample(prompt, response[: max_length - len(prompt)], _temperature(record))


def _temperature(record: dict[str, object]) -> float:
    value = record.get("temperature", 1.0)
    if isinstance(value, int | float) and math.isfinite(value) and value >= 0:
        return float(value)
    raise ValueError(f"temperature must be a number that is not negative, not {value!r}")


def _token_ids(record: dict[str, object], key: str, vocab_size: int) -> tuple[int, ...]:
    value = record.get(key)
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError(f"{key} must be a list of integers")
    if value and not (min(value) >= 0 and max(value) < vocab_size):
        raise ValueError(f"{key} holds a token outside the vocabulary of {vocab_size}")
    return tuple(value)


def read_samples(
    path: Path, *, vocab_size: int, max_length: int, start_byte: int = 0, max_samples: int | None = None
) -> ReadResult:
    """Complete lines after `start_byte`; bad ones are reported and skipped. A missing file is empty."""
    samples: list[Sample] = []
    offsets: list[int] = []
    errors: list[str] = []
    position = start_byte
    if not path.exists():
        return ReadResult(samples, offsets, errors, position)
    with path.open("rb") as file:
        file.seek(start_byte)
        for line in file:
            if not line.endswith(b"\n") or (max_samples is not None and len(samples) >= max_samples):
                break
            try:
                if line.strip():
                    samples.append(parse_sample(line, vocab_size=vocab_size, max_length=max_length))
                    offsets.append(position)
            except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are ValueErrors too
                errors.append(f"{path}:{line_number(path, position)}: {error}")
            position += len(line)
    return ReadResult(samples, offsets, errors, position)


def line_number(path: Path, position: int) -> int:
    """The line, from 1, that starts at a byte offset. Counted only where there is something to report."""
    with path.open("rb") as file:
        return file.read(position).count(b"\n") + 1
