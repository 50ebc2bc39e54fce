"""Headers that Serve's proxy cannot decode do not reach it."""

import asyncio

from ray.serve._private.utils import call_function_from_import_path
from starlette.types import Message, Receive, Scope, Send

from dspark_ray.cli.serve import _environment


def headers_behind(sent: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """What an application sees behind the middlewares that Ray is told of."""
    seen: list[tuple[bytes, bytes]] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(scope["headers"])

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    app = application
    for middleware in call_function_from_import_path(
        _environment()["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"]
    ):
        app = middleware.cls(app)
    asyncio.run(app({"type": "http", "headers": sent}, receive, send))
    return seen


def test_headers_that_are_not_utf8_are_dropped() -> None:
    good = [(b"x-request-id", b"abc"), (b"x-name", "Jörg".encode())]
    assert headers_behind([*good, (b"x-request-id", b"\xff\xfe"), (b"\xff", b"a")]) == good
