"""Every error a caller, an operator or a peer process can cause. Our own bugs are asserts."""


class DsparkError(Exception):
    """Base of all errors this program raises on purpose."""


class ConfigError(DsparkError):
    """A configuration that cannot work; the message says which key and what to write instead."""


class CheckpointError(DsparkError):
    """Weights that do not fit their config; the message names the tensor."""


class ArtefactError(DsparkError):
    """A table, calibration or cache made for something else (its digests differ) or damaged on disk."""


class DataError(DsparkError):
    """Training data that cannot be used; the message names the file and the line."""


class RequestError(DsparkError):
    """A request the client must change: becomes a 4xx with this message.

    `param` names the offending field, `status` is the HTTP status, `code` the OpenAI error code.
    """

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword-only arguments do not survive pickling (Ray, multiprocessing) by default.
        return (_rebuild_request_error, (self.message, self.param, self.status, self.code))


def _rebuild_request_error(message: str, param: str | None, status: int, code: str | None) -> RequestError:
    return RequestError(message, param=param, status=status, code=code)


class QueueFullError(DsparkError):
    """The bounded queue is full: becomes a 503 with Retry-After."""


class StartDeadlineError(QueueFullError):
    """A request that cannot start, or has not started, within the time that it was given."""


class EngineDeadError(DsparkError):
    """The engine process is gone or its loop failed; the replica must be replaced."""


class RankError(EngineDeadError):
    """A rank of the engine is gone, late or out of step; the message names it where that is known."""
