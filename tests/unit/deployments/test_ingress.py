"""The ingress' calls to replicas, without a cluster: whose cancellation is whose."""

import asyncio
from typing import Any

import pytest

from deployments.ingress import ReplicaBackend
from dspark_ray.core.errors import EngineDeadError
from dspark_ray.core.types import Request, SamplingParams

REQUEST = Request("r", (1,), SamplingParams())


class Call:
    """A `DeploymentHandle` and its only response."""

    def __init__(self) -> None:
        self.generate = self
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.cancelled = False

    def remote(self, request: Request) -> "Call":
        return self

    def __await__(self) -> Any:
        return self.answer.__await__()

    def cancel(self) -> None:
        self.cancelled = True


async def test_a_cancellation_from_below_is_a_lost_attempt() -> None:
    call = Call()
    call.answer.cancel()
    backend: Any = ReplicaBackend(call)  # type: ignore[arg-type]
    with pytest.raises(EngineDeadError, match="cancelled"):
        await backend.submit(REQUEST)


async def test_our_own_cancellation_stays_one_and_reaches_the_replica() -> None:
    call = Call()
    backend: Any = ReplicaBackend(call)  # type: ignore[arg-type]
    task = asyncio.create_task(backend.submit(REQUEST))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert call.cancelled
