"""`dspark-ray chat`: a conversation in the terminal, with a server or with an engine in this process."""

import contextlib
import json
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from rich.markup import escape

from dspark_ray.cli.common import (
    LocalEngine,
    MaxTokensOption,
    ModeOption,
    TemperatureOption,
    err,
    load_config,
    load_engine,
    out,
    print_error,
)
from dspark_ray.core.env import client_headers
from dspark_ray.core.errors import ConfigError, DsparkError, RequestError

if TYPE_CHECKING:
    from dspark_ray.core.types import SamplingParams

HELP = "Enter sends, /reset forgets the conversation, Ctrl-C stops an answer, Ctrl-D or /exit leaves."
_CONNECT_TIMEOUT_S = 10.0
_READ_TIMEOUT_S = 600.0


Pieces = Generator[str, None, None]


class Partner(Protocol):
    """Who answers."""

    def stream(self, messages: list[dict[str, str]]) -> Pieces:
        """The answer piece by piece; closing the generator aborts it. Raises `DsparkError`."""

    def summary(self) -> str:
        """What the last answer was like, for a dim line below it."""


def chat(
    url: Annotated[
        str | None, typer.Option(help="A running server, e.g. http://127.0.0.1:8000.", metavar="URL")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="Without --url: the engine to load here.", metavar="FILE.yaml"),
    ] = None,
    mode: ModeOption = None,
    system: Annotated[str | None, typer.Option(help="System message.", metavar="TEXT")] = None,
    max_tokens: MaxTokensOption = 512,
    temperature: TemperatureOption = 0.7,
) -> None:
    """Talk to a model: to a server (--url) or to one loaded into this process (--config)."""
    if (url is None) == (config is None):
        raise ConfigError("give --url of a running server, or --config of a model to load here")
    if url is not None:
        partner: Partner = ServerPartner(url, max_tokens, temperature)
    else:
        assert config is not None
        partner = LocalPartner(load_engine(load_config(config, mode=mode)), max_tokens, temperature)
    talk(partner, system)


def talk(partner: Partner, system: str | None) -> None:
    """Reads lines until the end of input; an answer that fails leaves the conversation as it was."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    err.print(f"[dim]{HELP}[/dim]")
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    while (line := _read_line()) is not None:
        if line == "/reset":
            messages = list(start)
            err.print("[dim]forgotten[/dim]")
        elif line:
            question = {"role": "user", "content": line}
            try:
                answer = _show(partner, [*messages, question])
            except DsparkError as error:
                print_error(str(error))
                continue
            messages += [question, {"role": "assistant", "content": answer}]


def _read_line() -> str | None:
    """The next line; None at the end."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if line in ("/exit", "/quit") else line


def _show(partner: Partner, messages: list[dict[str, str]]) -> str:
    """Prints the answer as it comes, and returns it; Ctrl-C keeps what there is."""
    answer = ""
    with contextlib.closing(partner.stream(messages)) as pieces:
        try:
            for piece in pieces:
                answer += piece
                out.print(piece, end="", markup=False, soft_wrap=True)
        except KeyboardInterrupt:
            out.print(" …", end="")
    out.print()
    err.print(f"[dim]{escape(partner.summary())}[/dim]")
    return answer


class LocalPartner:
    """An engine in this process; earlier turns come from its prefix cache."""

    def __init__(self, local: LocalEngine, max_tokens: int, temperature: float) -> None:
        self._local, self._max_tokens, self._temperature = local, max_tokens, temperature
        self._count = 0
        self._summary = ""

    def stream(self, messages: list[dict[str, str]]) -> Pieces:
        from dspark_ray.core.types import Request
        from dspark_ray.models.tokenizer import IncrementalDetokenizer

        engine, tokenizer = self._local.engine, self._local.tokenizer
        prompt = tuple(tokenizer.render_chat(messages))
        detokenizer = IncrementalDetokenizer(tokenizer)
        self._count += 1
        request_id = f"chat-{self._count}"
        before = (engine.counters.decode_tokens, engine.counters.request_steps)
        engine.add_request(Request(request_id, prompt, self._sampling(len(prompt))))
        started, num_tokens = time.monotonic(), 0
        try:
            while engine.has_work():
                for output in engine.step():
                    num_tokens += len(output.token_ids)
                    yield detokenizer.push(output.token_ids).text
            yield detokenizer.flush()
        finally:
            engine.abort(request_id)
            steps = engine.counters.request_steps - before[1]
            tau = (engine.counters.decode_tokens - before[0]) / steps if steps else 0.0
            rate = num_tokens / max(time.monotonic() - started, 1e-9)
            self._summary = f"{num_tokens} tokens, {rate:.1f} tokens/s, τ {tau:.2f}"

    def summary(self) -> str:
        return self._summary

    def _sampling(self, num_prompt: int) -> "SamplingParams":
        from dspark_ray.core.types import SamplingParams

        room = self._local.config.model.max_model_len - num_prompt
        if room < 1:
            raise RequestError("the conversation is longer than the model can hold; /reset starts a new one")
        return SamplingParams(
            temperature=self._temperature,
            max_tokens=min(self._max_tokens, room),
            stop_token_ids=self._local.tokenizer.eos_token_ids,
        )


class ServerPartner:
    """Any OpenAI-compatible server, with its first model."""

    def __init__(self, url: str, max_tokens: int, temperature: float) -> None:
        import httpx

        base = url.rstrip("/").removesuffix("/v1")
        timeout = httpx.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
        try:
            self._client = httpx.Client(base_url=base, timeout=timeout, headers=client_headers())
            models = self._client.get("/v1/models").raise_for_status().json()["data"]
            self._model = str(models[0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError) as error:
            raise ConfigError(f"no OpenAI-compatible server answers at {base}/v1/models: {error}") from error
        err.print(f"[dim]{escape(self._model)} at {escape(base)}[/dim]")
        self._options = {"max_tokens": max_tokens, "temperature": temperature}
        self._summary = ""

    def stream(self, messages: list[dict[str, str]]) -> Pieces:
        import httpx

        body = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        started = time.monotonic()
        self._summary = ""
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise RequestError(_error_message(response.text), status=response.status_code)
                for event in _events(response.iter_lines()):
                    if usage := event.get("usage"):
                        tokens, seconds = usage["completion_tokens"], time.monotonic() - started
                        self._summary = f"{tokens} tokens, {tokens / max(seconds, 1e-9):.1f} tokens/s"
                    for choice in event.get("choices", []):
                        yield choice["delta"].get("content") or ""
        except httpx.HTTPError as error:
            raise ConfigError(f"the connection to the server broke: {error}") from error

    def summary(self) -> str:
        return self._summary


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to [DONE]. `RequestError` for an error."""
    for line in lines:
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:"):
            continue
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise RequestError(_error_message(data))
        yield event


def _error_message(body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:500] or "the server gave no reason"
