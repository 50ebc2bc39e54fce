"""Drives a running server as its clients would: streams, a fixed number of them open at any time.

What a client sees is measured here: tokens are counted by the server's own usage, since one event may carry
several, and time per output token is taken over tokens, not events.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from dspark_ray.core.env import client_headers
from dspark_ray.core.errors import ConfigError
from dspark_ray.models.prompts import RawPrompt

_TIMEOUT = httpx.Timeout(600.0, connect=10.0)


@dataclass(frozen=True, slots=True)
class ClientTiming:
    """One request as its client saw it."""

    num_tokens: int
    ttft_ms: float  # to the first text
    total_ms: float  # to the last event of the answer; usage and [DONE], which follow, are no tokens
    error: str = ""
    finish_reason: str = ""
    num_prompt_tokens: int = 0
    text: str = ""

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first text; None for fewer than two tokens."""
        return (self.total_ms - self.ttft_ms) / (self.num_tokens - 1) if self.num_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Slo:
    """What a user calls fast enough."""

    ttft_ms: float
    tpot_ms: float

    def met_by(self, timing: ClientTiming) -> bool:
        """Whether a request was answered, soon and quickly; one token has no time per token."""
        return not timing.error and timing.ttft_ms <= self.ttft_ms and (timing.tpot_ms or 0.0) <= self.tpot_ms


@dataclass(frozen=True, slots=True)
class LoadReport:
    """All requests of one run."""

    concurrency: int
    wall_s: float
    timings: list[ClientTiming]

    def goodput(self, slo: Slo) -> dict[str, float]:
        """What counts when only requests within the SLO do."""
        good = [timing for timing in self.timings if slo.met_by(timing)]
        return {
            "goodput_requests_per_s": len(good) / self.wall_s,
            "goodput_tokens_per_s": sum(timing.num_tokens for timing in good) / self.wall_s,
            "within_slo": len(good) / max(len(self.timings), 1),
        }

    def finish_reasons(self) -> dict[str, int]:
        """How the answers ended."""
        return dict(Counter(timing.finish_reason for timing in self.timings if not timing.error))

    def figures(self) -> dict[str, float | int | None]:
        """What a server is judged by."""
        good = [timing for timing in self.timings if not timing.error]
        tpot = [timing.tpot_ms for timing in good if timing.tpot_ms is not None]
        return {
            "concurrency": self.concurrency,
            "requests": len(self.timings),
            "errors": len(self.timings) - len(good),
            "output_tokens": sum(timing.num_tokens for timing in good),
            "tokens_per_s": sum(timing.num_tokens for timing in good) / self.wall_s,
            "user_tokens_per_s": _percentile([1e3 / time_ms for time_ms in tpot if time_ms > 0], 50),
            "ttft_mean_ms": _mean([timing.ttft_ms for timing in good]),
            "ttft_p50_ms": _percentile([timing.ttft_ms for timing in good], 50),
            "ttft_p99_ms": _percentile([timing.ttft_ms for timing in good], 99),
            "tpot_mean_ms": _mean(tpot),
            "tpot_p50_ms": _percentile(tpot, 50),
            "tpot_p99_ms": _percentile(tpot, 99),
        }


def find_model(url: str) -> str:
    """The first model a server has; `ConfigError` if no server answers there."""
    try:
        models = httpx.get(f"{url}/v1/models", timeout=_TIMEOUT).raise_for_status().json()["data"]
        return str(models[0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"no OpenAI-compatible server answers at {url}/v1/models: {error}") from error


def drive(
    url: str,
    model: str,
    prompts: Sequence[RawPrompt],
    *,
    concurrency: int,
    max_tokens: int,
    temperature: float = 0.0,
    fields: Mapping[str, Any] | None = None,
    on_done: Callable[[ClientTiming], None] | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> LoadReport:
    """Sends every prompt once, `concurrency` at a time. Requests that fail are counted, never retried.

    `fields` are added to each body, for what only this server understands.
    """
    options = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        **(fields or {}),
    }

    async def run() -> LoadReport:
        gate = asyncio.Semaphore(concurrency)
        limits = httpx.Limits(max_connections=concurrency)
        async with httpx.AsyncClient(
            base_url=url, timeout=_TIMEOUT, limits=limits, transport=transport, headers=client_headers()
        ) as client:

            async def one(prompt: RawPrompt) -> ClientTiming:
                async with gate:
                    timing = await _request(client, prompt, options)
                if on_done is not None:
                    on_done(timing)
                return timing

            started = time.perf_counter()
            timings = await asyncio.gather(*(one(prompt) for prompt in prompts))
            return LoadReport(concurrency, time.perf_counter() - started, list(timings))

    return asyncio.run(run())


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of an open loop."""

    at_s: float  # after the start
    prompt: RawPrompt
    max_tokens: int
    fields: Mapping[str, Any] = field(default_factory=dict)  # more of its body


def drive_open(
    url: str,
    model: str,
    arrivals: Sequence[Arrival],
    *,
    transport: httpx.AsyncBaseTransport | None = None,
) -> LoadReport:
    """Sends each request at its time, whatever became of those before it: what a crowd of users does."""

    async def run() -> LoadReport:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=url, timeout=_TIMEOUT, limits=limits, transport=transport, headers=client_headers()
        ) as client:
            started = time.perf_counter()

            async def one(arrival: Arrival) -> ClientTiming:
                await asyncio.sleep(arrival.at_s - (time.perf_counter() - started))
                options = {
                    "model": model,
                    "max_tokens": arrival.max_tokens,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                    **arrival.fields,
                }
                return await _request(client, arrival.prompt, options)

            timings = await asyncio.gather(*(one(arrival) for arrival in arrivals))
            return LoadReport(len(arrivals), time.perf_counter() - started, list(timings))

    return asyncio.run(run())


async def _request(client: httpx.AsyncClient, prompt: RawPrompt, options: dict[str, Any]) -> ClientTiming:
    """One streamed request from its first byte to its end."""
    if prompt.messages is not None:
        route, body = "/v1/chat/completions", {**options, "messages": list(prompt.messages)}
    else:
        text = prompt.text if prompt.text is not None else list(prompt.token_ids or ())
        route, body = "/v1/completions", {**options, "prompt": text}
    answer, started = _Answer(), time.perf_counter()
    try:
        async with client.stream("POST", route, json=body) as response:
            if response.status_code != 200:
                return _failed(started, f"{response.status_code}: {(await response.aread())[:200]!r}")
            async for line in response.aiter_lines():
                if line.startswith("data:") and answer.read(line.removeprefix("data:").strip()):
                    break
    except (httpx.HTTPError, ValueError) as error:
        return _failed(started, f"{type(error).__name__}: {error}")
    if answer.error or not answer.usage:
        return _failed(started, answer.error or "the server told no usage")
    ended = answer.last or time.perf_counter()
    return ClientTiming(
        num_tokens=answer.usage.get("completion_tokens", 0),
        ttft_ms=1e3 * ((answer.first or ended) - started),
        total_ms=1e3 * (ended - started),
        finish_reason=answer.finish_reason,
        num_prompt_tokens=answer.usage.get("prompt_tokens", 0),
        text="".join(answer.parts),
    )


@dataclass(slots=True)
class _Answer:
    """A stream as far as it has come. Incomplete is an error until its end is seen."""

    first: float | None = None  # text
    last: float | None = None  # event with a choice
    finish_reason: str = ""
    usage: dict[str, int] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)
    error: str = "the stream ended without [DONE] or a finish reason"

    def read(self, data: str) -> bool:
        """One event; True after the last one. Some servers say [DONE], some only give a reason."""
        if data == "[DONE]":
            self.error = ""
            return True
        event = json.loads(data)
        if "error" in event:
            self.error = str(event["error"])
            return True
        self.usage = event.get("usage") or self.usage
        choices = event.get("choices", [])
        if choices:
            self.last = time.perf_counter()
        if text := _text(event):
            self.first = self.first or self.last
            self.parts.append(text)
        for choice in choices:
            if reason := choice.get("finish_reason"):
                self.finish_reason, self.error = reason, ""
        return False


def _text(event: dict[str, Any]) -> str:
    """The text of an event of either route."""
    return "".join(
        choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        for choice in event.get("choices", [])
    )


def _failed(started: float, error: str) -> ClientTiming:
    elapsed_ms = 1e3 * (time.perf_counter() - started)
    return ClientTiming(0, elapsed_ms, elapsed_ms, error)


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(np.array(values), percent)) if values else None
