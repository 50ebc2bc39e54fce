"""Errors as clients see them: OpenAI's body `{"error": {message, type, param, code}}` and an HTTP status."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dspark_ray.core.errors import (
    DsparkError,
    EngineDeadError,
    QueueFullError,
    RequestError,
    StartDeadlineError,
)

RETRY_AFTER_S = 1


class GenerationTimeoutError(DsparkError):
    """The request ran longer than `serving.request_timeout_s`; becomes a 504."""


class RateLimitError(DsparkError):
    """An API key asks for more than it may; becomes a 429. `kind` says of what: requests, tokens, ..."""

    def __init__(self, message: str, kind: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class HttpError:
    """One error response."""

    status: int
    body: dict[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


def error_body(
    message: str, kind: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object; its clients read `message`, `type`, `param` and `code`."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def http_error(error: BaseException) -> HttpError:
    """The response for any exception; what is not ours tells the client nothing of our insides."""
    if isinstance(error, RequestError):
        body = error_body(error.message, "invalid_request_error", param=error.param, code=error.code)
        return HttpError(error.status, body, {"WWW-Authenticate": "Bearer"} if error.status == 401 else {})
    if isinstance(error, RateLimitError):
        body = error_body(str(error), error.kind, code="rate_limit_exceeded")
        return HttpError(429, body, {"Retry-After": str(max(RETRY_AFTER_S, math.ceil(error.retry_after_s)))})
    if isinstance(error, QueueFullError):
        late = isinstance(error, StartDeadlineError)
        body = error_body(str(error), "overloaded_error", code="start_deadline" if late else "queue_full")
        return HttpError(503, body, {"Retry-After": str(RETRY_AFTER_S)})
    if isinstance(error, GenerationTimeoutError):
        return HttpError(504, error_body(str(error), "server_error", code="timeout"))
    if isinstance(error, EngineDeadError):
        return HttpError(500, error_body(str(error), "server_error", code="engine_failed"))
    return HttpError(500, error_body("internal server error", "server_error", code="internal_error"))
