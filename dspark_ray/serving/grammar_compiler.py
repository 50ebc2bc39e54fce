"""The ingress' side of grammar compilation: one worker process, a time limit, a cache."""

import asyncio
import contextlib
import hashlib
import json
import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from dspark_ray.core.errors import QueueFullError, RequestError
from dspark_ray.core.types import CompiledGrammar
from dspark_ray.serving.line_process import LineProcess

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0  # imports and the vocabulary
MAX_WAITING = 32
MAX_WAIT_S = 30.0  # for the grammars before it
REFUSED_FOR_S = 60.0  # a bad grammar is not tried again so soon: one that bursts costs a new process
MAX_REFUSED = 256
CACHE_BYTES = 64 << 20


class GrammarCompiler:
    """Compiles in a process of its own, started when the first grammar comes. Belongs to one event loop."""

    def __init__(self, command: Sequence[str], timeout_s: float, *, max_wait_s: float = MAX_WAIT_S) -> None:
        """`command` starts a process that speaks as serving/grammar_worker.py does."""
        self._command = tuple(command)
        self._timeout_s = timeout_s
        self._max_wait_s = max_wait_s
        self._worker: LineProcess | None = None
        self._one_at_a_time = asyncio.Lock()
        self._running: asyncio.Future[CompiledGrammar] | None = None  # the exchange with the worker
        self._num_here = 0  # callers, the one whose turn it is included
        self._closed = False
        self._cache: OrderedDict[str, CompiledGrammar] = OrderedDict()  # newest last
        self._cached_bytes = 0
        self._refused: OrderedDict[str, tuple[float, RequestError]] = OrderedDict()  # until when, and why

    @classmethod
    def of_model(cls, model_dir: Path, timeout_s: float) -> "GrammarCompiler":
        """For the vocabulary of a model directory."""
        return cls((sys.executable, "-m", "dspark_ray.serving.grammar_worker", str(model_dir)), timeout_s)

    async def compile(self, tag: str) -> CompiledGrammar:
        """Raises `RequestError` for a grammar that is wrong, too large or takes too long to compile, and
        `QueueFullError` when too many wait."""
        key = hashlib.sha256(tag.encode()).hexdigest()
        if (known := self._known(key)) is not None:
            return known
        if self._num_here >= MAX_WAITING:
            raise QueueFullError("too many grammars wait to be compiled; try again later")
        self._num_here += 1
        try:
            await self._turn()
            # A client that leaves now must not cut the exchange short: the next one would read its answer.
            self._running = asyncio.ensure_future(self._compile(key, tag))
            self._running.add_done_callback(_seen)
            return await asyncio.shield(self._running)
        finally:
            self._num_here -= 1

    async def close(self) -> None:
        """Ends the worker; who waits for it is sent away."""
        self._closed = True
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        await self._kill()

    async def _turn(self) -> None:
        """Until the worker is this caller's alone; `_compile` gives it back."""
        try:
            async with asyncio.timeout(self._max_wait_s):
                await self._one_at_a_time.acquire()
        except TimeoutError as error:
            raise QueueFullError("the grammars before this one take too long; try again later") from error
        if self._closed:
            self._one_at_a_time.release()
            raise QueueFullError("this server is ending; try again later")

    async def _compile(self, key: str, tag: str) -> CompiledGrammar:
        try:
            return self._known(key) or await self._tried(key, tag)
        finally:
            self._one_at_a_time.release()

    async def _tried(self, key: str, tag: str) -> CompiledGrammar:
        """Compiled, and its end remembered."""
        try:
            grammar = await self._compiled(tag)
        except RequestError as error:
            self._refuse(key, error)
            raise
        self._keep(key, grammar)
        return grammar

    async def _compiled(self, tag: str) -> CompiledGrammar:
        """By the worker, which has nothing else to do."""
        worker = await self._started()
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await _exchange(worker, {"tag": tag})
        except TimeoutError as error:
            await self._kill()
            raise RequestError(
                f"the grammar takes longer than {self._timeout_s:g} s to compile; make it smaller",
                code="invalid_grammar",
            ) from error
        if answer is None:
            await self._kill()
            raise RequestError("the grammar cannot be compiled", code="invalid_grammar")
        if "error" in answer:
            raise RequestError(str(answer["error"]), code="invalid_grammar")
        return CompiledGrammar(answer["digest"], answer["compiled"], tag)

    async def _started(self) -> LineProcess:
        """The running worker; raises what keeps it from starting."""
        if self._worker is not None:
            if self._worker.is_alive:
                return self._worker
            await self._kill()
        self._worker = await LineProcess.start(self._command)
        ready = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_TIMEOUT_S):
                ready = await _read(self._worker)
        if ready is None:
            await self._kill()
            raise RuntimeError("the process that compiles grammars does not start; the log says why")
        return self._worker

    async def _kill(self) -> None:
        if self._worker is not None:
            await self._worker.kill()
            self._worker = None

    def _known(self, key: str) -> CompiledGrammar | None:
        """What it was compiled to; raises what it was refused with not long ago."""
        until_s, error = self._refused.get(key, (0.0, None))
        if error is not None and time.monotonic() < until_s:
            raise RequestError(error.message, code=error.code)
        if key in self._cache:
            self._cache.move_to_end(key)
        return self._cache.get(key)

    def _keep(self, key: str, grammar: CompiledGrammar) -> None:
        self._cache[key] = grammar
        self._cached_bytes += len(grammar.compiled)
        while self._cached_bytes > CACHE_BYTES:
            self._cached_bytes -= len(self._cache.popitem(last=False)[1].compiled)

    def _refuse(self, key: str, error: RequestError) -> None:
        self._refused.pop(key, None)
        self._refused[key] = time.monotonic() + REFUSED_FOR_S, error
        while len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)


def _seen(exchange: "asyncio.Future[CompiledGrammar]") -> None:
    """Who left does not want its error."""
    if not exchange.cancelled():
        exchange.exception()


async def _exchange(worker: LineProcess, request: dict[str, str]) -> dict[str, str] | None:
    """The worker's answer; None if it died over the request."""
    await worker.write_line(json.dumps(request).encode())
    return await _read(worker)


async def _read(worker: LineProcess) -> dict[str, str] | None:
    line = await worker.read_line()
    return json.loads(line) if line else None
