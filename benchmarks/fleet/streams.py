"""A crowd of streaming clients that check every token.

The timed engine's text is known: token i of an answer to a prompt of P tokens is `token_at(P + i)`. A real
model's greedy text is that of the same request when nothing was wrong. A token lost, one sent twice and a
stream that ended early all show. A connection that broke is none of these: the client knows, and asks again.
"""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import httpx

from dspark_ray.engine.timed import token_at
from dspark_ray.models.fetch import resolve_model
from dspark_ray.models.tokenizer import Tokenizer

SILENCE_S = 40.0  # without a byte: the stream hangs
PAUSE_S = 0.2  # before a client asks again
PERIOD = 64  # of the texts


class Checker(Protocol):
    """Knows what texts should be; both methods return what is wrong, or nothing."""

    def fault_of(self, prompt: str, text: str, num_prompt_tokens: int) -> str:
        """Of a whole answer."""
        ...

    def gap_in(self, prompt: str, text: str) -> str:
        """Of the beginning of one."""
        ...


@dataclass(frozen=True, slots=True)
class TimedTexts:
    """Of the timed engine: each token is one character, which says where it stands."""

    characters: str  # by position modulo `PERIOD`
    max_tokens: int

    @classmethod
    def load(cls, max_tokens: int, source: str = "default") -> "TimedTexts":
        tokenizer = Tokenizer.load(resolve_model(source, weights=False))
        characters = "".join(tokenizer.decode([token_at(position)]) for position in range(PERIOD))
        assert len(set(characters)) == len(characters) == PERIOD, "each token is one character of its own"
        return cls(characters, max_tokens)

    def fault_of(self, prompt: str, text: str, num_prompt_tokens: int) -> str:
        return difference(text, self._text(num_prompt_tokens, self.max_tokens))

    def gap_in(self, prompt: str, text: str) -> str:
        start = self.characters.find(text[:1])
        return difference(text, self._text(start, len(text)))

    def _text(self, position: int, num_tokens: int) -> str:
        return "".join(self.characters[(position + i) % PERIOD] for i in range(num_tokens))


@dataclass(frozen=True, slots=True)
class KnownTexts:
    """Of any engine: as they were when asked for before, by prompt."""

    texts: Mapping[str, str]

    def fault_of(self, prompt: str, text: str, num_prompt_tokens: int) -> str:
        return difference(text, self.texts[prompt])

    def gap_in(self, prompt: str, text: str) -> str:
        return difference(text, self.texts[prompt][: len(text)])


def difference(text: str, expected: str) -> str:
    """Where a text leaves the expected one; empty: nowhere."""
    if text == expected:
        return ""
    place = next((i for i, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b), None)
    place = min(len(text), len(expected)) if place is None else place
    return (
        f"{len(text)} characters for {len(expected)}; {text[place:][:20]!r} for {expected[place:][:20]!r} "
        f"from {place}"
    )


@dataclass(slots=True)
class Tally:
    """What became of the requests."""

    whole: int = 0  # each token once, to the end
    lost: Counter[str] = field(default_factory=Counter)  # connections that broke, by how
    refused: int = 0  # 429 or 503 with Retry-After
    failed: list[str] = field(default_factory=list)  # errors that the server told, or should not have told
    wrong: list[str] = field(default_factory=list)  # tokens lost, sent twice or cut off, without an error
    hung: int = 0
    marks: list[tuple[float, int]] = field(default_factory=list)  # monotonic seconds, tokens that arrived

    def tokens_per_s(self, begin_s: float, end_s: float) -> float:
        """Of all clients together between two times."""
        return sum(count for at_s, count in self.marks if begin_s <= at_s < end_s) / (end_s - begin_s)

    def back_after_s(
        self, fault_s: float, until_s: float, normal: float, window_s: float = 2.0
    ) -> float | None:
        """From the fault to the first window with 95% of the normal rate that follows one with less; 0: none
        had less; None: it is not back. until_s: while all clients were asking
        """
        at_s, has_dipped = fault_s, False
        while at_s + window_s <= until_s:
            is_normal = self.tokens_per_s(at_s, at_s + window_s) >= 0.95 * normal
            if is_normal and has_dipped:
                return round(at_s - fault_s, 1)
            has_dipped = has_dipped or not is_normal
            at_s += 0.1
        return None if has_dipped else 0.0


@dataclass(frozen=True, slots=True)
class Reader:
    """How a client reads."""

    pause_s: float = 0.0  # once, after the first text, without reading
    leaves: bool = False  # after the first text


class Crowd(threading.Thread):
    """A client a prompt, each with one request after another, until `stop`; or each with one, if `once`."""

    def __init__(
        self,
        url: str,
        checker: Checker,
        prompts: Sequence[str],
        max_tokens: int,
        *,
        reader: Reader | None = None,
        once: bool = False,
        model: str = "timed",
    ) -> None:
        super().__init__(daemon=True)
        self.tally = Tally()
        self._url = url
        self._checker = checker
        self._prompts = prompts
        self._reader = reader or Reader()
        self._once = once
        self._body = {
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "model": model,
        }
        self._stopped = threading.Event()

    def stop(self, timeout_s: float = 60.0) -> Tally:
        """No new requests; those under way are read to their end."""
        self._stopped.set()
        self.join(timeout_s)
        if self.is_alive():
            self.tally.hung += 1
        return self.tally

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(SILENCE_S, connect=10.0)
        async with httpx.AsyncClient(base_url=self._url, timeout=timeout, limits=limits) as client:
            await asyncio.gather(*(self._client(client, prompt) for prompt in self._prompts))

    async def _client(self, client: httpx.AsyncClient, prompt: str) -> None:
        while True:
            if not await self._ask(client, prompt):
                await asyncio.sleep(PAUSE_S)
            if self._once or self._stopped.is_set():
                return

    async def _ask(self, client: httpx.AsyncClient, prompt: str) -> bool:
        """One request; whether it was answered."""
        tally, answer = self.tally, _Answer()
        try:
            body = {**self._body, "prompt": prompt}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    self._note_status(response.status_code, response.headers, await response.aread())
                    return False
                async for line in response.aiter_lines():
                    if line.startswith("data:"):
                        before = len(answer.text)
                        answer.read(line.removeprefix("data:").strip())
                        tally.marks.append((time.monotonic(), len(answer.text) - before))
                        if before == 0 and answer.text:
                            if self._reader.leaves:
                                return True
                            await asyncio.sleep(self._reader.pause_s)
        except httpx.ReadTimeout:
            tally.hung += 1
            return False
        except httpx.HTTPError as error:
            tally.lost[type(error).__name__] += 1
            if fault := self._checker.gap_in(prompt, answer.text):
                tally.wrong.append(fault)
            return False
        if answer.error:
            tally.failed.append(answer.error)
        elif not answer.is_done:
            tally.wrong.append(f"the stream of {len(answer.text)} tokens ended as if it were whole")
        elif fault := self._checker.fault_of(prompt, answer.text, answer.num_prompt_tokens):
            tally.wrong.append(fault)
        else:
            tally.whole += 1
            return True
        return False

    def _note_status(self, status: int, headers: httpx.Headers, body: bytes) -> None:
        """A 5xx without a body of ours is the proxy's, whose connection to the ingress broke."""
        if status in (429, 503) and "retry-after" in headers:
            self.tally.refused += 1
        elif status >= 500 and b'"error"' not in body:
            self.tally.lost[f"proxy's {status}"] += 1
        elif status == 404 and b'"error"' not in body:
            self.tally.lost["no route yet"] += 1
        else:
            self.tally.failed.append(f"{status} {body[:200]!r}")


@dataclass(slots=True)
class _Answer:
    text: str = ""
    num_prompt_tokens: int = 0
    error: str = ""
    is_done: bool = False

    def read(self, data: str) -> None:
        if data == "[DONE]":
            self.is_done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = str(event["error"])
        self.text += "".join(choice["text"] for choice in event.get("choices", ()))
        if event.get("usage"):
            self.num_prompt_tokens = event["usage"]["prompt_tokens"]


def merged(tallies: Sequence[Tally]) -> Tally:
    """Of several crowds together, without their marks."""
    found = Tally()
    for one in tallies:
        found.whole += one.whole
        found.lost += one.lost
        found.refused += one.refused
        found.failed += one.failed
        found.wrong += one.wrong
        found.hung += one.hung
    return found
