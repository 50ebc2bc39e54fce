"""Ingress: the HTTP side. Validates, tokenises, routes, streams, and resumes what a dead replica left."""

import asyncio
import importlib.metadata
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import zmq
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from dspark_ray.core.config import AppConfig
from dspark_ray.core.errors import DsparkError, EngineDeadError, QueueFullError
from dspark_ray.core.types import Request, RequestOutput
from dspark_ray.runtime.adapter_directory import AdapterDirectory
from dspark_ray.runtime.fleet_metrics import EngineFleet
from dspark_ray.runtime.logs import configure_logging
from dspark_ray.runtime.token_stream import TokenStream
from dspark_ray.runtime.transport import bind_inbox
from dspark_ray.serving.adapters import AdapterBook
from dspark_ray.serving.api_keys import KeyRing
from dspark_ray.serving.grammar_compiler import GrammarCompiler
from dspark_ray.serving.http import build_api
from dspark_ray.serving.logprobs import TextOfToken
from dspark_ray.serving.parsing import served_model
from dspark_ray.serving.request_log import RequestLog
from dspark_ray.serving.service import CompletionService
from dspark_ray.serving.text import NewDetokenizer, Tokenizer
from dspark_ray.serving.traces import Traces

logger = logging.getLogger(__name__)

WATCH_PERIOD_S = 2.0
_LOST = (RayActorError, ReplicaUnavailableError, TaskCancelledError)


@dataclass(frozen=True, slots=True)
class TextTools:
    """What turns text into tokens and back."""

    tokenizer: Tokenizer
    new_detokenizer: NewDetokenizer
    token_text: TextOfToken
    grammars: GrammarCompiler


TextFactory = Callable[[AppConfig], TextTools]
"""Loads the tokenizer of a configuration. May block for long."""


def model_text(config: AppConfig) -> TextTools:
    """The `TextFactory` of real models: the tokenizer beside the weights."""
    from dspark_ray.models.fetch import resolve_model
    from dspark_ray.models.token_text import TokenTexts
    from dspark_ray.models.tokenizer import Tokenizer as ModelTokenizer

    model_dir = resolve_model(config.model.source, weights=False)
    tokenizer = ModelTokenizer.load(model_dir)
    grammars = GrammarCompiler.of_model(model_dir, config.serving.grammar_timeout_s)
    return TextTools(tokenizer, tokenizer.detokenizer, TokenTexts(tokenizer), grammars)


class ReplicaBackend:
    """`dspark_ray.serving.generation.Backend` over a deployment handle: Serve picks the replica."""

    def __init__(self, server: DeploymentHandle) -> None:
        self._server = server

    async def submit(self, request: Request) -> RequestOutput:
        response = self._server.generate.remote(request)
        try:
            answer = await response
        except asyncio.CancelledError as error:
            response.cancel()
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # our caller's wish
            raise EngineDeadError("the call to the replica was cancelled") from error
        except BackPressureError as error:
            raise QueueFullError("all replicas are busy and the queue is full; try again later") from error
        except DeploymentUnavailableError as error:
            raise QueueFullError("no replica is available; try again later") from error
        except _LOST as error:
            raise EngineDeadError("the replica that ran this request died") from error
        except RayTaskError:
            logger.exception("a replica failed on %s", request.request_id)
            raise
        if isinstance(answer, DsparkError):
            raise answer
        return answer


@serve.ingress()
class Ingress:
    """One event loop; holds no model. Its routes are `dspark_ray.serving.http`."""

    async def __init__(  # type: ignore[misc]
        self, config: AppConfig, server: DeploymentHandle, text_factory: TextFactory
    ) -> None:
        configure_logging()
        self._config = config
        self._keys = KeyRing.of(config.security)
        self._text = await asyncio.to_thread(text_factory, config)
        context = zmq.Context()
        self._streams = TokenStream(context, bind_inbox(context, ray.util.get_node_ip_address()))
        self._streams.start()
        self._traces = Traces(config)
        log = config.observability.request_log
        self._request_log = None if log is None else RequestLog(log)
        app_name = serve.get_replica_context().app_name
        self._fleet = EngineFleet(app_name)
        directory = AdapterDirectory(app_name)
        self._adapters = await asyncio.to_thread(AdapterBook, config, directory, self._fleet)
        self._watcher = asyncio.create_task(self._fleet.watch(WATCH_PERIOD_S))
        self._service = CompletionService(
            ReplicaBackend(server),
            self._streams,
            self._text.new_detokenizer,
            self._text.token_text,
            config.serving.request_timeout_s,
            self._text.grammars.compile,
            watch=self._traces.watch,
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve once after the constructor."""
        model = served_model(self._config, self._text.tokenizer, self._adapters)
        return build_api(
            self._config,
            self._service,
            model,
            self._adapters,
            self._fleet,
            _versions(),
            self._traces.layers,
            self._keys,
            note=None if self._request_log is None else self._request_log.note,
        )

    async def __del__(self) -> None:
        if hasattr(self, "_watcher"):
            self._watcher.cancel()
            await self._streams.close()
            await self._text.grammars.close()
            await asyncio.to_thread(self._traces.close)
            if self._request_log is not None:
                await asyncio.to_thread(self._request_log.close)


def _versions() -> dict[str, str]:
    packages: dict[str, Any] = {"dspark_ray": "dspark-ray", "ray": "ray", "torch": "torch"}
    found = {}
    for key, package in packages.items():
        try:
            found[key] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[key] = "unknown"
    return found
