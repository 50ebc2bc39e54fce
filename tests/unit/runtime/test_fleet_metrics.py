"""What the ingress knows of its engines while Ray's directory hangs or fails."""

import asyncio
import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from dspark_ray.core.clock import ManualClock
from dspark_ray.core.config import AppConfig
from dspark_ray.runtime import fleet_metrics
from dspark_ray.runtime.fleet_metrics import FRESH_MS, EngineFleet
from dspark_ray.runtime.names import NAMESPACE, engine_name
from tests.fakes import FakeEngine


class Directory:
    """Ray's list of actors with one engine in it; `error` is raised instead, `held` makes it hang."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.held: threading.Event | None = None
        self.num_listings = 0

    def list(self, all_namespaces: bool) -> list[dict[str, str]]:
        self.num_listings += 1
        if self.held is not None:
            self.held.wait(5.0)
        if self.error is not None:
            raise self.error
        return [{"name": engine_name("app", "r1"), "namespace": NAMESPACE}]


async def _stats() -> Any:
    return FakeEngine(AppConfig(), "r1").stats()


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Directory:
    directory = Directory()
    handle = SimpleNamespace(stats=SimpleNamespace(remote=_stats))
    monkeypatch.setattr(fleet_metrics, "list_named_actors", directory.list)
    monkeypatch.setattr(fleet_metrics.ray, "get_actor", lambda name, namespace: handle)
    monkeypatch.setattr(fleet_metrics, "ANSWER_TIMEOUT_S", 0.05)
    return directory


async def test_a_directory_that_fails_is_said_once_and_hides_nobody(
    directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    fleet = EngineFleet("app", clock)
    assert [stats.engine_id for stats in await fleet.stats()] == ["r1"]
    directory.error = OSError("down")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            clock.advance(FRESH_MS)
            assert len(await fleet.stats()) == 1
    assert caplog.text.count("cannot list engines") == 1


async def test_a_directory_that_hangs_holds_one_thread_and_nobody_up(directory: Directory) -> None:
    directory.held = threading.Event()
    clock = ManualClock()
    fleet = EngineFleet("app", clock)
    for _ in range(3):
        clock.advance(FRESH_MS)
        assert await asyncio.wait_for(fleet.stats(), 1.0) == []
    assert fleet.last_stats() == []
    assert directory.num_listings == 1
    directory.held.set()


async def test_a_watcher_outlives_every_error(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = EngineFleet("app", ManualClock())
    failures = iter([ValueError("odd")])

    async def stats() -> list[Any]:
        for error in failures:
            raise error
        seen.set()
        return []

    seen = asyncio.Event()
    monkeypatch.setattr(fleet, "stats", stats)
    watcher = asyncio.create_task(fleet.watch(0.0))
    await asyncio.wait_for(seen.wait(), 1.0)
    watcher.cancel()
