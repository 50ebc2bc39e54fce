"""What the ingress knows of its engines while Ray's directory hangs or fails."""

import asyncio
import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from dspark_ray.core.clock import ManualClock
from dspark_ray.core.config import AppConfig
from dspark_ray.core.errors import EngineDeadError, RequestError
from dspark_ray.core.types import AdapterRef, SwapOrder, SwapState
from dspark_ray.runtime import fleet_metrics
from dspark_ray.runtime.fleet_metrics import FRESH_MS, EngineFleet
from dspark_ray.runtime.names import NAMESPACE, engine_name
from tests.fakes import FakeEngine

LONG_S = 60.0  # longer than anything here takes on a machine that is busy


class Directory:
    """Ray's list of actors with one engine in it; `error` is raised instead, `held` makes it hang."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.held: threading.Event | None = None
        self.num_listings = 0
        self.listed = threading.Event()

    def list(self, all_namespaces: bool) -> list[dict[str, str]]:
        self.num_listings += 1
        self.listed.set()
        if self.held is not None:
            self.held.wait(LONG_S)
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
    monkeypatch.setattr(fleet_metrics, "ANSWER_TIMEOUT_S", LONG_S)  # what answers does so in time
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


async def test_a_directory_that_hangs_holds_one_thread_and_nobody_up(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_metrics, "ANSWER_TIMEOUT_S", 0.05)  # it hangs for longer, whatever else runs
    directory.held = threading.Event()
    clock = ManualClock()
    fleet = EngineFleet("app", clock)
    for _ in range(3):
        clock.advance(FRESH_MS)
        assert await asyncio.wait_for(fleet.stats(), LONG_S) == []
    assert fleet.last_stats() == []
    directory.held.set()
    await asyncio.to_thread(directory.listed.wait, LONG_S)  # its thread may begin late
    assert directory.num_listings == 1


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
    await asyncio.wait_for(seen.wait(), LONG_S)
    watcher.cancel()


class Engines:
    """Two engines' answers to what is told to all; the handles are Ray's in shape."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[Any]]) -> None:
        self.told: list[tuple[str, str, tuple[Any, ...]]] = []
        names = [engine_name("app", replica) for replica in ("r1", "r2")]
        listed = [{"name": name, "namespace": NAMESPACE} for name in names]

        def handle(place: int) -> SimpleNamespace:
            def method(name: str) -> SimpleNamespace:
                async def answer(*arguments: Any) -> Any:
                    self.told.append((f"r{place + 1}", name, arguments))
                    given = answers.get(name, [None, None])[place]
                    if isinstance(given, RayActorError):
                        raise given
                    return given

                return SimpleNamespace(remote=lambda *a: asyncio.ensure_future(answer(*a)))

            names = ("load_drafter", "end_trial", "swap_state", "load_adapter", "unload_adapter")
            return SimpleNamespace(**{name: method(name) for name in names})

        handles = {name: handle(place) for place, name in enumerate(names)}
        monkeypatch.setattr(fleet_metrics, "list_named_actors", lambda all_namespaces: listed)
        monkeypatch.setattr(fleet_metrics.ray, "get_actor", lambda name, namespace: handles[name])


ORDER = SwapOrder("/drafters/new", id="1")


async def test_a_drafter_is_tried_by_all_engines_or_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = RequestError("its shapes are another target's", code="invalid_drafter")
    engines = Engines(monkeypatch, {"load_drafter": [None, refusal]})
    with pytest.raises(RequestError, match="another target's"):
        await EngineFleet("app").load_drafter(ORDER)
    await asyncio.sleep(0)
    assert ("r1", "end_trial", (False, ORDER)) in engines.told  # that trial, and no other
    engines = Engines(monkeypatch, {})
    await EngineFleet("app").load_drafter(ORDER)
    assert sorted(engines.told) == [(name, "load_drafter", (ORDER,)) for name in ("r1", "r2")]


async def test_every_replica_tells_how_its_trial_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [SwapState("trial", ORDER), SwapState("promoted", ORDER)]
    Engines(monkeypatch, {"swap_state": states})
    assert await EngineFleet("app").swap_states() == {"r1": states[0], "r2": states[1]}


async def test_an_adapter_is_known_once_all_engines_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = AdapterRef("sql", "/lora/sql", "digest")
    engines = Engines(monkeypatch, {})
    assert await EngineFleet("app").load_adapter(adapter) == 2
    assert ("r2", "load_adapter", (adapter,)) in engines.told
    Engines(monkeypatch, {"load_adapter": [RayActorError(), None]})
    with pytest.raises(EngineDeadError, match="did not answer to load_adapter"):
        await EngineFleet("app").load_adapter(adapter)
