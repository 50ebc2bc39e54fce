"""Unequal replicas of the timed engine behind the real application: router, weighted plans, labels."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import ray
from ray import serve

from deployments.app import build_app
from dspark_ray.core.config import parse_app_config
from dspark_ray.scheduling.step_table import StepTable
from tests.ray.conftest import Fleet, eventually

APP = "timed"


@pytest.fixture(scope="module")
def timed(cluster: str, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("tables")
    for name, factor in (("fast", 1.0), ("slow", 4.0)):
        verify_ms = factor * np.array([20.0, 24.0, 40.0])
        StepTable(rows=[1, 32, 160], verify_ms=verify_ms, requests=[1, 32], draft_ms=[1.0, 2.0]).save(
            folder / f"{name}.json"
        )
    tables = [str(folder / "fast.json"), str(folder / "slow.json")]
    config = parse_app_config(
        {
            "model": {"id": "timed", "source": str(model_dir), "max_model_len": 1024},
            "engine": {"kind": "timed", "timed": {"step_tables": tables, "acceptance": [[0.9], [0.5]]}},
            "scheduler": {"policy": "weighted"},
            "serving": {
                "num_replicas": 2,
                "replica_cpus": 0.1,
                "router": "goodput",
                "router_stats_period_s": 0.2,
            },
        }
    )
    serve.run(build_app(config), name=APP, route_prefix="/timed")
    fleet = Fleet(cluster + "/timed", APP)
    eventually(lambda: fleet.client.get("/ready").status_code == 200, timeout_s=120.0)
    yield fleet
    fleet.client.close()
    serve.delete(APP)


def _send(fleet: Fleet, number: int, **fields: Any) -> list[int]:
    """Requests at once → the tokens of each answer."""

    async def send() -> list[httpx.Response]:
        body = {"model": "timed", "max_tokens": 40, **fields}
        async with httpx.AsyncClient(base_url=fleet.url, timeout=120.0) as client:
            posts = [
                client.post("/v1/completions", json={"prompt": f"{n} " * 9, **body}) for n in range(number)
            ]
            return await asyncio.gather(*posts)

    answers = asyncio.run(send())
    assert {answer.status_code for answer in answers} == {200}
    return [answer.json()["usage"]["completion_tokens"] for answer in answers]


def _finished(fleet: Fleet) -> dict[float, int]:
    """Requests ended by replica, by the throughput of one request there."""
    return {stats.rates[0][1]: stats.num_finished for stats in fleet.stats().values()}


def test_the_fast_replica_takes_more_and_all_is_labelled(timed: Fleet) -> None:
    _send(timed, 2)  # loads have been reported once replicas have run
    before = _finished(timed)
    assert len(before) == 2
    assert _send(timed, 20) == [40] * 20
    eventually(timed.is_idle)
    after = _finished(timed)
    served = [after[max(after)] - before[max(before)], after[min(after)] - before[min(before)]]
    assert sum(served) == 20
    assert served[0] > served[1]
    body = timed.client.get("/health").json()
    assert (body["engine"], body["simulated"]) == ("timed", True)
    assert timed.metric("dspark_timed_engines") == 2.0
    counters = [stats.counters for stats in timed.stats().values()]
    assert all(c.drafted_tokens == c.verified_tokens + c.trimmed_tokens for c in counters)
    assert sum(c.accepted_tokens for c in counters) > 0


def test_a_session_stays_where_its_prefix_is(timed: Fleet) -> None:
    prompt = "once upon a time " * 40
    before = {name: stats.prefix_hit_tokens for name, stats in timed.stats().items()}
    for _ in range(4):
        _send(timed, 1, prompt=prompt, prompt_cache_key="story", service_tier="priority")
    hits = {name: stats.prefix_hit_tokens - before[name] for name, stats in timed.stats().items()}
    assert sorted(hits.values())[0] == 0
    assert max(hits.values()) >= 3 * 600
    state = ray.get(timed.scheduler().state.remote())
    assert (state["policy"], len(state["replicas"])) == ("weighted", 2)
    assert all(stats.plan_age_ms is not None for stats in timed.stats().values())
