"""A request body as a JSON object: bounded in bytes, in depth and in what numbers may be."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pydantic_core

from dspark_ray.core.errors import RequestError

MAX_BODY_BYTES = 8 << 20
BODY_TIMEOUT_S = 60.0


async def read_body(
    chunks: AsyncIterator[bytes],
    content_length: str | None,
    *,
    limit_bytes: int = MAX_BODY_BYTES,
    timeout_s: float = BODY_TIMEOUT_S,
) -> bytes:
    """The whole body; raises `RequestError` 413 as soon as it is known to pass the limit, and 408 for one
    that does not come."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(chunks, content_length, limit_bytes)
    except TimeoutError as error:
        message = f"the request body has not arrived within {timeout_s:g} s"
        raise RequestError(message, status=408, code="request_timeout") from error


async def _read(chunks: AsyncIterator[bytes], content_length: str | None, limit_bytes: int) -> bytes:
    if content_length is not None and content_length.isdecimal() and int(content_length) > limit_bytes:
        raise _too_large(limit_bytes)
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > limit_bytes:
            raise _too_large(limit_bytes)
    return bytes(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; raises `RequestError` for broken JSON, NaN, great depth, other types.

    pydantic's parser is used because it bounds the nesting itself and refuses NaN and Infinity, which
    `json.loads` accepts.
    """
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the request body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise RequestError("the request body must be a JSON object", code="invalid_json")
    return value


def _too_large(limit_bytes: int) -> RequestError:
    message = f"the request body is larger than {limit_bytes} bytes"
    return RequestError(message, status=413, code="request_too_large")
