"""Prompts are written down only where that is wanted, as training reads them, and nothing with them."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from dspark_ray.core.config import RequestLogConfig, parse_app_config
from dspark_ray.core.errors import ConfigError
from dspark_ray.models.prompts import read_prompts
from dspark_ray.models.tokenizer import Tokenizer
from dspark_ray.serving.request_log import RequestLog
from tests.fakes import FakeEngine
from tests.local_app import LocalApp
from tests.tiny import tiny_tokenizer_dir

MESSAGES = [{"role": "user", "content": "hello"}]


def without_digits(line: dict[str, Any]) -> dict[str, Any] | None:
    """An operator's function: drops lines that mention a password, and hides digits."""
    text = json.dumps(line)
    if "password" in text:
        return None
    if "crash" in text:
        raise ValueError(text)
    return json.loads("".join("#" if c.isdigit() else c for c in text))  # type: ignore[no-any-return]


def written(folder: Path, bodies: list[dict[str, Any]], **config: Any) -> list[dict[str, Any]]:
    log = RequestLog(RequestLogConfig(folder=str(folder), **config), random.Random(0))
    for body in bodies:
        log.note(body)
    log.close()
    return [json.loads(line) for line in log.path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ({"messages": MESSAGES, "temperature": 0.3, "user": "me"}, [{"messages": MESSAGES}]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "é"}]}]},
            [{"messages": [{"role": "user", "content": "é"}]}],
        ),
        (
            {"input": "hello", "instructions": "be brief"},
            [{"messages": [{"role": "system", "content": "be brief"}, *MESSAGES]}],
        ),
        ({"prompt": "a\nb"}, [{"prompt": "a\nb"}]),
        ({"prompt": "a", "messages": None, "input": None}, [{"prompt": "a"}]),
        ({"prompt": ["a", "b"]}, [{"prompt": "a"}, {"prompt": "b"}]),
        ({"prompt": [5, 6]}, [{"prompt_ids": [5, 6]}]),
        ({"prompt": [[5, 6], [7]]}, [{"prompt_ids": [5, 6]}, {"prompt_ids": [7]}]),
    ],
)
def test_what_is_written(tmp_path: Path, body: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    assert written(tmp_path, [body]) == lines


def test_training_reads_it(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tiny_tokenizer_dir(tmp_path / "tokenizer"))
    log = RequestLog(RequestLogConfig(folder=str(tmp_path / "log")))
    for body in ({"messages": MESSAGES}, {"prompt": "abc"}, {"prompt": [5, 6]}):
        log.note(body)
    log.close()
    prompts = [prompt.token_ids for prompt in read_prompts(log.path, tokenizer)]
    assert prompts[0] == tuple(tokenizer.render_chat(MESSAGES))
    assert prompts[1:] == [tuple(tokenizer.encode("abc")), (5, 6)]


def test_the_operators_function_decides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bodies = [{"prompt": text} for text in ("call 555", "my password", "crash here", "fine")]
    lines = written(tmp_path, bodies, redact="tests.unit.serving.test_request_log:without_digits")
    assert lines == [{"prompt": "call ###"}, {"prompt": "fine"}]
    assert "not written down: ValueError" in caplog.text
    assert "crash here" not in caplog.text


def test_a_share_of_the_requests(tmp_path: Path) -> None:
    assert 20 < len(written(tmp_path, [{"prompt": "a"}] * 200, sample_ratio=0.2)) < 65


def test_files_are_bounded_and_private(tmp_path: Path) -> None:
    log = RequestLog(RequestLogConfig(folder=str(tmp_path), max_file_mib=1, max_files=2))
    for number in range(40):
        log.note({"prompt": f"{number}" + "x" * 100_000})
    log.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert all(path.stat().st_size <= 1 << 20 for path in tmp_path.iterdir())
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"redact": "no.such.module:f"}, "there is no 'no.such.module:f'"),
        ({"redact": "json:nothing"}, "there is no 'json:nothing'"),
        ({"redact": "json:__name__"}, "is no function"),
        ({"folder": "/proc/nothing"}, "cannot write /proc/nothing"),
    ],
)
def test_a_wrong_configuration_is_told(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        RequestLog(RequestLogConfig(**{"folder": str(tmp_path), **config}))


async def test_only_accepted_requests_are_noted(tmp_path: Path) -> None:
    config = parse_app_config(
        {"model": {"id": "m", "max_model_len": 256}, "speculation": {"drafter": {"kind": "ngram"}}}
    )
    assert config.observability.request_log is None
    tokenizer = Tokenizer.load(tiny_tokenizer_dir(tmp_path / "tokenizer"))
    noted: list[dict[str, Any]] = []
    app = LocalApp(tokenizer, FakeEngine(config, step_ms=0.0), config, note=noted.append)
    for body in ({"prompt": "abc"}, {"prompt": 5}, {"prompt": "abc", "temperature": -1}):
        await app.client.post("/v1/completions", json={"model": "m", "max_tokens": 2, **body})
    await app.client.post("/tokenize", json={"model": "m", "prompt": "abc"})
    assert [body["prompt"] for body in noted] == ["abc"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_tells_no_prompt(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = RequestLog(RequestLogConfig(folder=str(tmp_path)))
    full = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115  (the log closes it)
    log._file.stream.close()
    log._file.stream = full  # type: ignore[assignment]
    log.note({"prompt": "xylophone"})
    log.close()
    assert "xylophone" not in "".join(capfd.readouterr())
