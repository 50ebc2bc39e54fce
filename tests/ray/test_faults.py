"""Two replicas under one scheduler actor: together, and while what is around them dies."""

import asyncio
import json
import os
import signal
import threading
import time
from typing import Any

import httpx
import pytest
import ray

from tests.ray.conftest import CAP, Fleet, eventually

PROMPT = "0123456789abcdefghijklmnopqrstuvwxyz"
NUM_TOKENS = 3600  # six seconds of the fake's steps
EXPECTED = (PROMPT * (NUM_TOKENS // len(PROMPT) + 1))[:NUM_TOKENS]


class Stream(threading.Thread):
    """One long stream, read in the background; `at_middle` is set when it is well under way."""

    def __init__(self, fleet: Fleet, num_tokens: int = NUM_TOKENS) -> None:
        super().__init__(daemon=True)
        self._fleet = fleet
        self._num_tokens = num_tokens
        self.at_middle = threading.Event()
        self.text = ""
        self.last: dict[str, Any] = {}
        self.broken: httpx.HTTPError | None = None  # the connection
        self.start()

    def run(self) -> None:
        try:
            self._read()
        except httpx.HTTPError as error:
            self.broken = error

    def _read(self) -> None:
        body = {"model": "fake", "prompt": PROMPT, "max_tokens": self._num_tokens, "stream": True}
        with self._fleet.client.stream("POST", "/v1/completions", json=body, timeout=120.0) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self.last = json.loads(line.removeprefix("data: "))
                    self.text += "".join(choice["text"] for choice in self.last.get("choices", ()))
                if len(self.text) > 150:
                    self.at_middle.set()

    def check(self) -> None:
        """It ended as if nothing had happened."""
        self.join(timeout=120.0)
        assert not self.is_alive()
        assert self.broken is None
        assert "error" not in self.last, self.last
        assert self.text == EXPECTED[: self._num_tokens]
        assert self.last["choices"][0]["finish_reason"] == "length"


def test_two_replicas_serve_together(fleet: Fleet) -> None:
    before = {name: stats.num_finished for name, stats in fleet.stats().items()}
    streams = [Stream(fleet, num_tokens=300) for _ in range(12)]
    for stream in streams:
        stream.check()
    eventually(fleet.is_idle)
    served = {name: stats.num_finished - before[name] for name, stats in fleet.stats().items()}
    assert len(served) == 2
    assert sum(served.values()) == 12
    assert min(served.values()) >= 1
    replicas = ray.get(fleet.scheduler().state.remote())["replicas"]
    assert len(replicas) == 2


def test_halving_the_cap_halves_both_budgets_within_a_second(fleet: Fleet) -> None:
    async def flood() -> None:
        body = {"model": "fake", "prompt": PROMPT, "max_tokens": NUM_TOKENS}
        async with httpx.AsyncClient(base_url=fleet.url, timeout=120.0) as client:
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}

    load = threading.Thread(target=lambda: asyncio.run(flood()))
    load.start()
    # All are in: the cap is split by demand, which then stays as it is for the fake's six seconds.
    eventually(lambda: sum(stats.num_running for stats in fleet.stats().values()) == 20)
    assert all(stats.num_running >= 3 for stats in fleet.stats().values())

    def budgets() -> dict[str, float]:
        return {name: stats.budget_tokens for name, stats in fleet.stats().items()}

    def steady() -> bool:
        # All of the cap is used (the fake verifies cap × its step time, 5 ms, a step), and the split has
        # followed the demand: at first one replica's requests are reported before the other's.
        first = budgets()
        time.sleep(0.6)
        second = budgets()
        used = abs(sum(second.values()) - CAP * 0.005) < 0.2
        return used and all(second[name] == pytest.approx(first[name], rel=0.05) for name in first)

    eventually(steady, timeout_s=5.0)
    before = budgets()

    def halved() -> bool:
        return all(budget == pytest.approx(before[name] / 2, rel=0.25) for name, budget in budgets().items())

    ray.get(fleet.scheduler().set_cap.remote(CAP / 2))
    eventually(halved, timeout_s=1.0)
    ray.get(fleet.scheduler().set_cap.remote(CAP))
    load.join(timeout=120.0)
    assert not load.is_alive()


@pytest.mark.parametrize("how", ["process", "actor"])
def test_the_schedulers_death_costs_no_request(fleet: Fleet, how: str) -> None:
    stream = Stream(fleet)
    assert stream.at_middle.wait(30.0)
    scheduler = fleet.scheduler()
    if how == "process":
        os.kill(ray.get(scheduler.pid.remote()), signal.SIGKILL)
    else:
        ray.kill(scheduler)
    assert "dspark_engines 2.0" in fleet.client.get("/metrics").text
    stream.check()
    state = eventually(lambda: _state(fleet))
    assert len(state["replicas"]) == 2


def _state(fleet: Fleet) -> dict[str, Any] | None:
    try:
        state = ray.get(fleet.scheduler().state.remote(), timeout=5)
    except (ray.exceptions.RayError, ValueError):
        return None
    return state if len(state["replicas"]) == 2 else None


@pytest.mark.parametrize("victim", ["engine", "server"])
def test_a_dead_replica_costs_no_token(fleet: Fleet, victim: str) -> None:
    stream = Stream(fleet)
    assert stream.at_middle.wait(30.0)
    emitted = fleet.metric("dspark_emitted_tokens_total")
    name = fleet.busy_engine()
    assert name is not None
    if victim == "engine":
        os.kill(ray.get(fleet.engines()[name].pid.remote()), signal.SIGKILL)
    else:
        ray.kill(_server_of(fleet, name))
    stream.check()
    assert fleet.metric("dspark_emitted_tokens_total") >= emitted
    eventually(lambda: fleet.num_ready() == 2 and name not in fleet.stats(), timeout_s=60.0)
    eventually(lambda: fleet.client.get("/ready").json()["replicas"]["ready"] == 2, timeout_s=5.0)


def test_a_dead_ingress_breaks_its_connections_and_no_answer_looks_whole(fleet: Fleet) -> None:
    streams = [Stream(fleet) for _ in range(3)]
    assert all(stream.at_middle.wait(30.0) for stream in streams)
    ray.kill(_serve_replica(f"{fleet.app_name}#Ingress#"))
    for stream in streams:
        stream.join(timeout=30.0)
        assert not stream.is_alive()
        assert stream.broken is not None
        assert EXPECTED.startswith(stream.text)
    eventually(lambda: fleet.client.get("/ready").status_code == 200, timeout_s=60.0)
    eventually(fleet.is_idle)  # nobody reads those tokens any more
    after = Stream(fleet, num_tokens=200)
    after.check()


def _server_of(fleet: Fleet, engine_name: str) -> Any:
    """The Serve replica that owns an engine; both names end with the replica's id."""
    return _serve_replica(engine_name.rsplit(":", 1)[1])


def _serve_replica(part: str) -> Any:
    """The one whose name contains `part`."""
    names = [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)]
    (name,) = [name for name in names if name.startswith("SERVE_REPLICA") and part in name]
    return ray.get_actor(name, "serve")


def test_clients_are_told_at_once_when_everything_is_full(fleet: Fleet) -> None:
    async def flood() -> list[httpx.Response]:
        body = {"model": "fake", "prompt": PROMPT, "max_tokens": 1500}
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=fleet.url, timeout=120.0, limits=limits) as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(150)))

    started = time.monotonic()
    answers = asyncio.run(flood())
    assert time.monotonic() - started < 60.0
    assert {answer.status_code for answer in answers} == {200, 503}
    refused = next(answer for answer in answers if answer.status_code == 503)
    assert refused.headers["retry-after"]
    assert refused.json()["error"]["code"] == "queue_full"
    eventually(fleet.is_idle)
