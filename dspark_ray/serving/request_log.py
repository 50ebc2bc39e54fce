"""What clients ask, written down to train a drafter on one's own traffic.

Off unless `observability.request_log` is configured. A line a prompt, in the shapes that `generate-data
--prompts` reads. Nothing else of a request is kept: no key, no address, no answer. `redact` names a function
of the operator's that sees each line first.
"""

import contextlib
import importlib
import json
import logging
import os
import queue
import random
import threading
from collections.abc import Callable, Iterator
from io import FileIO, TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from dspark_ray.core.config import RequestLogConfig
from dspark_ray.core.errors import ConfigError
from dspark_ray.serving.messages import Message
from dspark_ray.serving.response_request import as_chat

logger = logging.getLogger(__name__)

Redact = Callable[[dict[str, Any]], dict[str, Any] | None]
"""A line as it would be written → as it may be; None: not at all."""

NoteBody = Callable[[dict[str, Any]], None]
"""Takes the body of a request that was accepted. Returns at once."""

_MOST_WAITING = 1000  # bodies; more are left out
_CLOSE_S = 5.0


class _PrivateFile(RotatingFileHandler):
    """What people ask is for the owner's eyes: the files after a rotation, too."""

    def _open(self) -> TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return TextIOWrapper(FileIO(descriptor, "a"), encoding=self.encoding, write_through=True)

    def handleError(self, record: logging.LogRecord) -> None:
        """Not logging's way, which prints the record, and so what was asked, to stderr."""
        raise  # called where the error is handled


class RequestLog:
    """One file of an ingress process, rotated by size; written by a thread of its own."""

    def __init__(self, config: RequestLogConfig, rng: random.Random | None = None) -> None:
        """`ConfigError` for a folder that cannot be written, or a `redact` that is no function."""
        self._share = config.sample_ratio
        self._rng = rng or random.Random()
        self._redact = find_redact(config.redact)
        self.path = Path(config.folder) / f"requests-{os.uname().nodename}-{os.getpid()}.jsonl"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            most_bytes, num_old = config.max_file_mib << 20, config.max_files - 1
            self._file = _PrivateFile(self.path, "a", most_bytes, num_old, encoding="utf-8")
        except OSError as error:
            message = f"observability.request_log: cannot write {self.path}: {error.strerror}"
            raise ConfigError(message) from error
        self._bodies: queue.Queue[dict[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def note(self, body: dict[str, Any]) -> None:
        """`NoteBody`. While the disk is too slow, requests are left out."""
        if self._rng.random() < self._share and not self._bodies.full():
            self._bodies.put_nowait(body)

    def close(self) -> None:
        """Writes what waits; gives up after some seconds."""
        self._bodies.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (body := self._bodies.get()) is not None:
            try:
                for line in map(self._redacted, prompt_lines(body)):
                    if line is not None:
                        self._write(line)
            except Exception as error:  # of whatever kind, the operator's function included; without the text
                logger.warning("a request was not written down: %s", type(error).__name__)
        with contextlib.suppress(OSError):
            self._file.close()

    def _redacted(self, line: dict[str, Any]) -> dict[str, Any] | None:
        return line if self._redact is None else self._redact(line)

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, ensure_ascii=False)
        self._file.emit(logging.LogRecord("", logging.INFO, "", 0, text, None, None))


def prompt_lines(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The prompts of a request that was accepted, as models/prompts.py reads them."""
    body = {name: value for name, value in body.items() if value is not None}  # which routes take as absent
    if "input" in body:
        body = as_chat(body)[1]
    if "messages" in body:
        messages = [Message.model_validate(message).for_template() for message in body["messages"]]
        yield {"messages": messages}
        return
    prompt = body["prompt"]
    many = isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt)
    for one in prompt if many else [prompt]:
        yield {"prompt" if isinstance(one, str) else "prompt_ids": one}


def find_redact(name: str | None) -> Redact | None:
    """The function that `package.module:function` names; `ConfigError` if there is none."""
    if name is None:
        return None
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"observability.request_log.redact: there is no {name!r}: {error}") from error
    if not callable(found):
        raise ConfigError(f"observability.request_log.redact: {name!r} is no function")
    return found  # type: ignore[no-any-return]
