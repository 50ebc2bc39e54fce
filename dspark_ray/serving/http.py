"""The routes. Any server that runs ASGI can carry them; what answers them is injected."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from dspark_ray.core.clock import Clock
from dspark_ray.core.config import AppConfig, HotSwapConfig, ServingConfig
from dspark_ray.core.errors import DsparkError, RequestError
from dspark_ray.core.types import EngineStats
from dspark_ray.serving import responses
from dspark_ray.serving.access import Access, admitted, ticket_of
from dspark_ray.serving.adapters import AdapterBook, LoadAdapter, UnloadAdapter
from dspark_ray.serving.api_keys import KeyRing
from dspark_ray.serving.body import validate
from dspark_ray.serving.drafters import SwapDrafter, SwappingEngines, states_body, swap_order
from dspark_ray.serving.errors import error_body, http_error
from dspark_ray.serving.json_body import parse_object, read_body
from dspark_ray.serving.limits import Accounts
from dspark_ray.serving.parsing import (
    Job,
    ServedModel,
    find_adapter,
    parse_chat,
    parse_completion,
    parse_response,
)
from dspark_ray.serving.request_id import RequestIds, request_id_of
from dspark_ray.serving.request_log import NoteBody
from dspark_ray.serving.service import CompletionService, EventStream
from dspark_ray.serving.status import Readiness, status_body
from dspark_ray.serving.tokenization import detokenize, tokenize
from dspark_ray.serving.ui_page import add_ui

logger = logging.getLogger(__name__)

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"

ParseJob = Callable[[dict[str, Any], ServedModel, str], Job]
"""(body, model, request id) → what to do. Raises `RequestError`; may take long for long texts."""


class Fleet(SwappingEngines, Protocol):
    """What the replicas say of themselves; no call of these fails because a replica does."""

    def last_stats(self) -> list[EngineStats]:
        """What is known already: returns at once."""
        ...

    async def stats(self) -> list[EngineStats]: ...

    async def metrics_page(self) -> bytes: ...


def build_api(
    config: AppConfig,
    service: CompletionService,
    model: ServedModel,
    adapters: AdapterBook,
    fleet: Fleet,
    versions: dict[str, str],
    layers: Sequence[Middleware] = (),
    keys: KeyRing | None = None,
    clock: Clock | None = None,
    note: NoteBody | None = None,
) -> FastAPI:
    """The whole HTTP surface of one application; without `keys` it is open to everyone. layers: around all of
    it, the outermost first. note: is told every body that is accepted"""
    api = FastAPI(title="dspark-ray", version=versions.get("dspark_ray", ""))
    _add_error_handlers(api)
    if keys is not None:
        accounts = Accounts(config.serving.num_ingress_replicas, clock)
        api.add_middleware(Access, ring=keys, accounts=accounts, open_metrics=config.security.open_metrics)
    api.add_middleware(RequestIds)  # around the other: refusals carry an id, too
    for layer in reversed(layers):
        api.add_middleware(layer.cls, *layer.args, **layer.kwargs)
    _add_generation(api, service, model, adapters, config.serving, note)
    _add_tokenization(api, model, adapters)
    _add_models(api, model, adapters)
    if adapters.loads_at_run_time:
        _add_adapter_loading(api, model, adapters)
    if config.speculation.hot_swap.load_from is not None:
        _add_drafter_swapping(api, config.speculation.hot_swap, fleet)
    _add_operations(api, config, fleet, versions)
    add_ui(api)
    return api


async def _json_object(request: Request) -> dict[str, Any]:
    try:
        body = await read_body(request.stream(), request.headers.get("content-length"))
    except ClientDisconnect as error:
        raise RequestError("the client left before its request was whole", status=499) from error
    return parse_object(body)


async def _job_body(request: Request, adapters: AdapterBook) -> dict[str, Any]:
    """The body, with the model that it names looked up."""
    body = await _json_object(request)
    await adapters.look_up(body.get("model"))
    return body


def _add_generation(
    api: FastAPI,
    service: CompletionService,
    model: ServedModel,
    adapters: AdapterBook,
    serving: ServingConfig,
    note: NoteBody | None,
) -> None:
    async def respond(request: Request, parse: ParseJob) -> Response:
        body = await _job_body(request, adapters)
        # Templates and tokenisation of a long prompt take long enough to stall every other stream.
        job = await asyncio.to_thread(parse, body, model, request_id_of(request))
        ticket = ticket_of(request)
        job = admitted(job, body, ticket).with_start_limits(serving.start_within_s)
        meter = None if ticket is None else ticket.note
        if note is not None:
            note(body)
        if job.stream:
            return _SseResponse(await service.stream(job, meter))
        return JSONResponse(await service.answer(job, meter))

    @api.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await respond(request, parse_chat)

    @api.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await respond(request, parse_completion)

    @api.post("/v1/responses")
    async def create_response(request: Request) -> Response:
        return await respond(request, parse_response)


def _add_tokenization(api: FastAPI, model: ServedModel, adapters: AdapterBook) -> None:
    @api.post("/tokenize")
    async def tokenize_prompt(request: Request) -> dict[str, Any]:
        return await asyncio.to_thread(tokenize, await _job_body(request, adapters), model)

    @api.post("/detokenize")
    async def detokenize_tokens(request: Request) -> dict[str, Any]:
        return await asyncio.to_thread(detokenize, await _job_body(request, adapters), model)


def _add_models(api: FastAPI, model: ServedModel, adapters: AdapterBook) -> None:
    created = int(time.time())

    @api.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        await adapters.refresh()
        served = [None, *adapters.known.values()]
        return {"object": "list", "data": [responses.model_body(model, created, one) for one in served]}

    @api.get("/v1/models/{model_id:path}")
    async def retrieve_model(model_id: str) -> dict[str, Any]:
        await adapters.look_up(model_id)
        adapter = None if model_id == model.id else find_adapter(model_id, model)
        return responses.model_body(model, created, adapter)


def _add_adapter_loading(api: FastAPI, model: ServedModel, adapters: AdapterBook) -> None:
    @api.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: Request) -> dict[str, Any]:
        """`replicas`: the engines that hold it now; any other reads it at its first request."""
        fields = validate(LoadAdapter, await _json_object(request))
        adapter, num_replicas = await adapters.load(fields.lora_name, fields.lora_path)
        return {**responses.model_body(model, int(time.time()), adapter), "replicas": num_replicas}

    @api.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(request: Request) -> dict[str, Any]:
        fields = validate(UnloadAdapter, await _json_object(request))
        adapter = await adapters.unload(fields.lora_name)
        return {"id": adapter.name, "object": "model", "deleted": True}


def _add_drafter_swapping(api: FastAPI, config: HotSwapConfig, fleet: SwappingEngines) -> None:
    async def states() -> dict[str, Any]:
        return states_body(await fleet.swap_states())

    @api.get("/v1/drafter")
    async def trial_state() -> dict[str, Any]:
        return await states()

    @api.post("/v1/drafter/swap")
    async def swap_drafter(request: Request) -> dict[str, Any]:
        await fleet.load_drafter(swap_order(validate(SwapDrafter, await _json_object(request)), config))
        return await states()

    @api.post("/v1/drafter/promote")
    async def promote_drafter() -> dict[str, Any]:
        await fleet.end_trial(promote=True)
        return await states()

    @api.post("/v1/drafter/roll_back")
    async def roll_back_drafter() -> dict[str, Any]:
        await fleet.end_trial(promote=False)
        return await states()


def _add_operations(api: FastAPI, config: AppConfig, fleet: Fleet, versions: dict[str, str]) -> None:
    readiness = Readiness(config.serving.least_replicas)

    def status(stats: list[EngineStats]) -> tuple[bool, dict[str, Any]]:
        ready = readiness.update(stats)
        return ready, status_body(config, stats, ready=ready)

    @api.get("/health")
    async def health() -> dict[str, Any]:
        """Liveness: 200 as long as this process answers. It asks nobody, so nothing can make it hang."""
        return status(fleet.last_stats())[1]

    @api.get("/ready")
    async def ready() -> JSONResponse:
        """200 once a canary generation has passed on each replica, 503 before."""
        is_ready, body = status(await fleet.stats())
        return JSONResponse(body, status_code=200 if is_ready else 503)

    @api.get("/metrics")
    async def metrics() -> Response:
        return Response(await fleet.metrics_page(), media_type=PROMETHEUS_TEXT)

    @api.get("/version")
    async def version() -> dict[str, str]:
        """`version` is this program's own, as other servers have it; the rest is what it runs on."""
        return {"version": versions.get("dspark_ray", ""), **versions}


def _add_error_handlers(api: FastAPI) -> None:
    async def known(_: Request, error: Exception) -> JSONResponse:
        described = http_error(error)
        return JSONResponse(described.body, status_code=described.status, headers=dict(described.headers))

    async def unknown(request: Request, error: Exception) -> JSONResponse:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return await known(request, error)

    async def no_route(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path[:128]}: {error.detail}"
        body = error_body(
            message, "invalid_request_error", code="not_found" if error.status_code == 404 else None
        )
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    api.add_exception_handler(DsparkError, known)
    api.add_exception_handler(HTTPException, no_route)
    api.add_exception_handler(Exception, unknown)


class _SseResponse(StreamingResponse):
    """Closes its stream whatever ends the response: a client that leaves must free everything."""

    def __init__(self, events: EventStream) -> None:
        super().__init__(events.__aiter__(), headers={"Cache-Control": "no-cache"})
        self.headers["Content-Type"] = "text/event-stream; charset=utf-8"
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.close()
