"""Requests whose slow part (loading a grammar) is done beside the step loop before they are admitted."""

import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from dspark_ray.core.types import Request
from dspark_ray.runtime.messages import Submit

SlowWork = Callable[[], object]
PrepareRequest = Callable[[Request], SlowWork | None]
"""What must happen on another thread before a request is added; None: nothing."""


class Preparation:
    """One helper thread. All methods belong to the loop's thread."""

    def __init__(self, prepare: PrepareRequest) -> None:
        self._prepare = prepare
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prepare")
        self._waiting: dict[str, Submit] = {}
        self._done: queue.SimpleQueue[tuple[str, Future[object]]] = queue.SimpleQueue()

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting)

    def take(self, message: Submit) -> bool:
        """Whether the request must wait here; `finished` gives it back."""
        work = self._prepare(message.request)
        if work is None:
            return False
        request_id = message.request.request_id
        self._waiting[request_id] = message
        self._thread.submit(work).add_done_callback(lambda future: self._done.put((request_id, future)))
        return True

    def drop(self, request_id: str) -> bool:
        """Forgets a request; False if it does not wait here."""
        return self._waiting.pop(request_id, None) is not None

    def finished(self) -> list[tuple[Submit, BaseException | None]]:
        """Requests that can be added now, or the error that stands against it."""
        ready: list[tuple[Submit, BaseException | None]] = []
        while True:
            try:
                request_id, future = self._done.get_nowait()
            except queue.Empty:
                return ready
            message = self._waiting.pop(request_id, None)
            if message is not None:
                ready.append((message, future.exception()))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
