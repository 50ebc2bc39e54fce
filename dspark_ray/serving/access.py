"""Who may use which route, before anything of a request is read. Active where API keys are configured.

Whatever is not listed here needs a key; the routes of operators need an admin key. A pure ASGI layer, since
it accompanies a request to its end: a stream counts as running until its last byte.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark_ray.core.errors import DsparkError, RequestError
from dspark_ray.core.types import SERVICE_TIERS, Priority
from dspark_ray.serving.api_keys import ApiKey, KeyRing
from dspark_ray.serving.errors import http_error
from dspark_ray.serving.limits import Accounts, Ticket
from dspark_ray.serving.parsing import Job

METRICS = "/metrics"
# What a probe and a page without figures need; they tell nothing of requests.
OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/ui", "/ui/app.js"})
ADMIN_PREFIXES = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/drafter", METRICS)

_STATE = "ticket"
_NO_KEY = "no API key was given; send it as 'Authorization: Bearer KEY'"
_WRONG_KEY = "the API key is not known here"


class Access:
    """Wraps an application."""

    def __init__(self, app: ASGIApp, ring: KeyRing, accounts: Accounts, *, open_metrics: bool) -> None:
        self._app = app
        self._ring = ring
        self._accounts = accounts
        self._open_paths = OPEN_PATHS | ({METRICS} if open_metrics else frozenset())
        self._revision = ring.revision

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = _route_path(scope)
        if scope["type"] != "http" or path in self._open_paths:
            await self._app(scope, receive, send)
            return
        try:
            ticket = self._admit(scope, path)
        except DsparkError as error:
            told = http_error(error)
            answer = JSONResponse(told.body, status_code=told.status, headers=dict(told.headers))
            await answer(scope, receive, send)
            return
        scope.setdefault("state", {})[_STATE] = ticket

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(ticket.headers())
            await send(message)

        try:
            await self._app(scope, receive, send_with_limits)
        finally:
            ticket.close()

    def _admit(self, scope: Scope, path: str) -> Ticket:
        self._ring.refresh()
        if self._revision != self._ring.revision:
            self._revision = self._ring.revision
            self._accounts.forget({key.name for key in self._ring.keys})
        key = self._ring.find(_bearer(Headers(scope=scope)))
        if key is None:
            raise RequestError(_WRONG_KEY, status=401, code="invalid_api_key")
        if path.startswith(ADMIN_PREFIXES) and not key.admin:
            message = f"API key {key.name!r} may not use {path[:128]}: an admin key may"
            raise RequestError(message, status=403, code="insufficient_permissions")
        return self._accounts.open(key, counts=scope["method"] == "POST")


def ticket_of(request: Request) -> Ticket | None:
    """Of the key that this request came with; None where no keys are configured."""
    ticket = request.scope.get("state", {}).get(_STATE)
    assert ticket is None or isinstance(ticket, Ticket)
    return ticket


def admitted(job: Job, body: Mapping[str, Any], ticket: Ticket | None) -> Job:
    """The job with its key's tier and name, its tokens taken. Raises `RequestError` or `RateLimitError`."""
    if ticket is None:
        return job
    key, claimed = ticket.key, job.requests[0].priority
    names_tier = body.get("service_tier", "auto") not in (None, "auto")
    priority = replace(claimed, tier=claimed.tier if names_tier else key.tier)
    _check_claims(priority, key)
    most = sum(request.sampling.max_tokens for request in job.requests)
    ticket.reserve(job.prompt_tokens, most)
    requests = (replace(request, priority=priority, client=key.name) for request in job.requests)
    return replace(job, requests=tuple(requests))


def _check_claims(claimed: Priority, key: ApiKey) -> None:
    def refuse(param: str, most: str) -> RequestError:
        message = f"API key {key.name!r} may not claim this {param}: {most}"
        return RequestError(message, param=param, status=403, code="insufficient_permissions")

    if SERVICE_TIERS.index(claimed.tier) > SERVICE_TIERS.index(key.tier):
        raise refuse("service_tier", f"its highest is {key.tier.value!r}")
    if claimed.level < key.least_priority:
        raise refuse("priority", f"its least is {key.least_priority}")
    if (claimed.target_tokens_per_s or 0.0) > key.max_target_tokens_per_s:
        raise refuse("target_tokens_per_second", f"its most is {key.max_target_tokens_per_s:g}")


def _bearer(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise RequestError(_NO_KEY, status=401, code="invalid_api_key")
    return key.strip()


def _route_path(scope: Scope) -> str:
    """The path as the routes know it: without the prefix that the application is mounted at."""
    path, root = str(scope.get("path", "")), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(root + "/") else path
