"""Prompt files: four shapes, and the line that is wrong is named."""

from pathlib import Path

import pytest

from dspark_ray.core.errors import ConfigError
from dspark_ray.models.prompts import read_prompts, read_raw_prompts
from dspark_ray.models.tokenizer import Tokenizer
from tests.tiny import tiny_tokenizer_dir


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    (tmp_path / "model").mkdir()
    return Tokenizer.load(tiny_tokenizer_dir(tmp_path / "model"))


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_all_shapes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(
        tmp_path,
        '{"prompt_ids": [5, 6], "response_ids": [7]}',
        '{"turns": ["hi", "more"]}',
        "",
        '{"messages": [{"role": "user", "content": "hi"}]}',
        '{"prompt": "hi"}',
    )
    ids, turns, messages, text = read_prompts(path, tokenizer)
    assert ids.token_ids == (5, 6)
    assert turns.token_ids == messages.token_ids
    assert list(turns.token_ids) == tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert list(text.token_ids) == tokenizer.encode("hi")
    assert [p.line for p in (ids, turns, messages, text)] == [1, 2, 4, 5]


def test_a_limit_stops_before_bad_lines(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "a"}', '{"prompt": "b"}', "garbage")
    assert len(read_raw_prompts(path, limit=2)) == 2


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[1]",
        "{}",
        '{"text": "a"}',
        '{"prompt": ""}',
        '{"prompt": 3}',
        '{"turns": []}',
        '{"turns": [3]}',
        '{"messages": ["hi"]}',
        '{"prompt_ids": [1, "2"]}',
        '{"prompt_ids": [true]}',
        '{"messages": [{"role": "robot", "content": "hi"}]}',
        '{"messages": [{"content": "hi"}]}',
        "[" * 100_000,
    ],
)
def test_the_bad_line_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:2"):
        read_raw_prompts(write(tmp_path, '{"prompt": "a"}', line))


def test_a_refusing_template_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path, '{"messages": [{"role": "user"}]}')
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:1"):
        read_prompts(path, tokenizer)


def test_bad_lines_can_be_left_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "prompts.jsonl"
    bad = (b"\xff\xfe", b"{", b'{"messages": [{"role": "user"}]}', b'{"messages": [{"role": "robot"}]}')
    path.write_bytes(b"\n".join((b'{"prompt": "a"}', *bad, b'{"prompt": "b"}')))
    told: list[str] = []
    prompts = read_prompts(path, tokenizer, on_bad_line=told.append)
    assert [prompt.line for prompt in prompts] == [1, 6]
    assert sorted(message.split(" ")[0].rstrip(":") for message in told) == [
        f"{path}:{n}" for n in (2, 3, 4, 5)
    ]
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:2 is not UTF-8"):
        read_prompts(path, tokenizer)


def test_empty_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no prompts"):
        read_raw_prompts(write(tmp_path, ""))
    with pytest.raises(ConfigError, match="cannot read"):
        read_raw_prompts(tmp_path / "absent.jsonl")
