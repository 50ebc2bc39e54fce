"""What stands before Serve's own HTTP proxy; `dspark-ray serve` names it to Ray (cli/serve.py)."""

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send


class ReadableHeaders:
    """Drops headers that are not UTF-8, on which the proxy of Ray 2.60 fails with a 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "headers": [pair for pair in scope["headers"] if all(map(_readable, pair))]}
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """For RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH."""
    return [Middleware(ReadableHeaders)]


def _readable(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
