"""Reading samples: bad lines are named and skipped, growing files are followed."""

import json
from pathlib import Path

import pytest

from dspark_ray.training.data import read_samples

GOOD = {"prompt_ids": [1, 2], "response_ids": [3, 4, 5], "temperature": 0.7}


def read(path: Path, **kwargs: int):
    return read_samples(path, vocab_size=10, max_length=8, **kwargs)


def test_good_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n")
    result = read(path)
    assert result.samples[0].prompt_ids == (1, 2)
    assert result.samples[0].response_ids == (3, 4, 5)
    assert result.samples[0].temperature == 0.7
    assert not result.errors
    assert result.next_byte == path.stat().st_size


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{broken", "Expecting"),
        (b"\xff\xfe", "utf-8"),
        (b"[1]", "not a JSON object"),
        (json.dumps(GOOD | {"response_ids": []}).encode(), "at least two"),
        (json.dumps(GOOD | {"response_ids": "ab"}).encode(), "list of integers"),
        (json.dumps(GOOD | {"response_ids": [True, 2]}).encode(), "list of integers"),
        (json.dumps(GOOD | {"prompt_ids": []}).encode(), "prompt_ids is empty"),
        (json.dumps(GOOD | {"prompt_ids": [11]}).encode(), "outside the vocabulary"),
        (json.dumps(GOOD | {"prompt_ids": [1] * 7}).encode(), "max_length"),
        (json.dumps(GOOD | {"temperature": "hot"}).encode(), "temperature must be a number"),
        (json.dumps(GOOD | {"temperature": None}).encode(), "temperature must be a number"),
        (json.dumps(GOOD | {"temperature": float("nan")}).encode(), "temperature must be a number"),
        (json.dumps(GOOD | {"temperature": -1}).encode(), "temperature must be a number"),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_bad_line_is_reported_and_skipped(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(line + b"\n" + json.dumps(GOOD).encode() + b"\n")
    result = read(path)
    assert len(result.samples) == 1
    assert result.offsets == [len(line) + 1]
    assert len(result.errors) == 1
    assert result.errors[0].startswith(f"{path}:1: ")
    assert reason in result.errors[0]


def test_long_response_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(GOOD | {"response_ids": [3] * 20}) + "\n")
    assert len(read(path).samples[0].response_ids) == 6


def test_growing_file(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    assert read(path).next_byte == 0
    line = json.dumps(GOOD)
    path.write_text(line + "\n" + line[:10])
    first = read(path)
    assert len(first.samples) == 1
    path.write_text(line + "\n" + line + "\n")
    assert len(read(path, start_byte=first.next_byte).samples) == 1
    assert len(read(path, max_samples=1).samples) == 1
