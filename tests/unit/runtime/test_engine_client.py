"""How an engine's client hears that a process of its engine has ended. The actors are futures here."""

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from dspark_ray.core.errors import EngineDeadError, RankError
from dspark_ray.runtime import engine_client
from dspark_ray.runtime.engine_client import EngineClient


class Link:
    """Notes what its requests are told."""

    def __init__(self) -> None:
        self.told: list[EngineDeadError] = []

    def fail(self, error: EngineDeadError) -> None:
        self.told.append(error)


def task_error(error: Exception) -> RayTaskError:
    return RayTaskError("run", str(error), error)


def watched(ends: dict[str, Exception | None], monkeypatch: pytest.MonkeyPatch) -> tuple[str, Link, int]:
    """(reason, link, number of times the death was told) after these loops end one after the other; others
    go on."""
    monkeypatch.setattr(engine_client, "GRACE_S", 0.05)
    link, deaths = Link(), []
    client = EngineClient(actor=None, ranks=(), info=None, link=link)  # type: ignore[arg-type]
    client._on_death = deaths.append

    async def watch() -> None:
        loop = asyncio.get_running_loop()
        runs: dict[str, Any] = {name: loop.create_future() for name in ("the engine", "rank 1", "rank 2")}
        watcher = asyncio.create_task(client._watch(runs))
        for name, error in ends.items():
            await asyncio.sleep(0)
            if error is None:
                runs[name].set_result(None)
            else:
                runs[name].set_exception(error)
        await watcher
        with pytest.raises(EngineDeadError):
            await client.check_health()

    monkeypatch.setattr(client, "_control", lambda _: _raise(client._dead))
    client._actor = _NoActor()
    asyncio.run(watch())
    return str(deaths[0]), link, len(deaths)


class _NoActor:
    """Any method of it can be asked for."""

    def __getattr__(self, name: str) -> Any:
        return self

    def remote(self) -> None:
        return None


async def _raise(error: EngineDeadError | None) -> None:
    assert error is not None
    raise error


def test_the_rank_that_died_is_named_before_those_that_failed_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = task_error(RankError("ranks cannot reach each other"))
    reason, link, times = watched(
        {"the engine": lost, "rank 2": lost, "rank 1": ActorDiedError()}, monkeypatch
    )
    assert reason.startswith("the engine died: rank 1: ")
    assert "the engine: " in reason
    assert (len(link.told), times) == (1, 1)


def test_an_idle_engine_does_not_outlive_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    reason, link, times = watched({"rank 2": ActorDiedError()}, monkeypatch)
    assert reason.startswith("the engine died: rank 2: ")
    assert (len(link.told), times) == (1, 1)


def test_a_loop_that_ends_by_itself_is_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched({"the engine": None}, monkeypatch)[0] == "the engine died: the engine: its loop ended"
