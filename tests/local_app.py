"""The whole HTTP application in this process, around an engine that steps in the event loop."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
from starlette.middleware import Middleware

from dspark_ray.core.clock import Clock
from dspark_ray.core.config import AppConfig
from dspark_ray.core.errors import RequestError
from dspark_ray.core.types import CompiledGrammar
from dspark_ray.models.token_text import TokenTexts
from dspark_ray.models.tokenizer import Tokenizer
from dspark_ray.serving.adapters import AdapterBook
from dspark_ray.serving.api_keys import KeyRing
from dspark_ray.serving.generation import RetryPolicy
from dspark_ray.serving.http import build_api
from dspark_ray.serving.parsing import served_model
from dspark_ray.serving.request_log import NoteBody
from dspark_ray.serving.service import CompletionService, WatchOutputs, unwatched
from tests.fakes import FakeDirectory, LocalServer, OneEngineFleet

CompileGrammar = Callable[[str], Awaitable[CompiledGrammar]]


async def no_grammars(tag: str) -> CompiledGrammar:
    raise RequestError("no grammars here", code="invalid_grammar")


def compile_here(vocabulary: Any) -> CompileGrammar:
    """By a `GrammarVocabulary`, in a thread of this process: nothing bounds it."""

    async def compile_grammar(tag: str) -> CompiledGrammar:
        return await asyncio.to_thread(vocabulary.compile, tag)

    return compile_grammar


class LocalApp:
    """The API around `engine` (fake or real), and a client of it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        engine: Any,
        config: AppConfig,
        compile_grammar: CompileGrammar = no_grammars,
        directory: FakeDirectory | None = None,
        fleet: OneEngineFleet | None = None,
        watch: WatchOutputs = unwatched,
        layers: Sequence[Middleware] = (),
        keys: KeyRing | None = None,
        note: NoteBody | None = None,
        key_clock: Clock | None = None,
        **retry: Any,
    ) -> None:
        self.local = LocalServer(engine)
        self.fleet = fleet or OneEngineFleet(engine)
        service = CompletionService(
            self.local,
            self.local,
            tokenizer.detokenizer,
            TokenTexts(tokenizer),
            config.serving.request_timeout_s,
            compile_grammar,
            RetryPolicy(backoff_s=(0.0,), **retry),
            watch,
        )
        self.adapters = AdapterBook(config, directory or FakeDirectory(), self.fleet)
        model = served_model(config, tokenizer, self.adapters)
        self.api = build_api(
            config,
            service,
            model,
            self.adapters,
            self.fleet,
            {"dspark_ray": "1"},
            layers,
            keys,
            key_clock,
            note,
        )
        transport = httpx.ASGITransport(self.api, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=None)

    async def settle(self) -> None:
        """Nothing may be left once cancelled calls have ended."""
        for _ in range(20):
            await asyncio.sleep(0)
        assert self.local.is_idle
