"""`X-Request-Id` in and out: every response carries the client's id, or one of ours.

A pure ASGI layer, because errors of every kind must carry it too, and because it must not buffer streams.
"""

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark_ray.serving.errors import error_body

HEADER = "X-Request-Id"
_STATE = "request_id"
_VALID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIds:
    """Wraps an application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER)
        request_id = uuid.uuid4().hex if given is None else given
        if not _VALID.fullmatch(request_id):
            message = f"{HEADER} must be 1 to 128 visible ASCII characters"
            body = error_body(message, "invalid_request_error", param=HEADER, code="invalid_value")
            await JSONResponse(body, status_code=400)(scope, receive, send)
            return
        scope.setdefault("state", {})[_STATE] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id_of(request: Request) -> str:
    """The id under which this request is answered."""
    return str(request.scope["state"][_STATE])
