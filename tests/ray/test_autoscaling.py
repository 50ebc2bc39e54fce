"""The autoscaling policy in Serve's controller: a second replica under load, and back to one after it."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from ray import serve

from deployments.app import build_app
from dspark_ray.core.config import parse_app_config
from dspark_ray.scheduling.step_table import StepTable
from tests.ray.conftest import Fleet, eventually

APP = "elastic"


@pytest.fixture(scope="module")
def elastic(cluster: str, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    table = tmp_path_factory.mktemp("tables") / "table.json"
    StepTable(rows=[1, 8, 64], verify_ms=[40.0, 44.0, 400.0], requests=[1, 8], draft_ms=[1.0, 2.0]).save(
        table
    )
    scaling = {"max_replicas": 2, "target_tokens_per_s": 20.0, "down_after_s": 2.0, "stats_period_s": 0.5}
    config = parse_app_config(
        {
            "model": {"id": "timed", "source": str(model_dir), "max_model_len": 1024},
            "engine": {"kind": "timed", "timed": {"step_tables": [str(table)]}, "max_running": 8},
            "serving": {"replica_cpus": 0.1, "router": "goodput", "autoscaling": scaling},
        }
    )
    serve.run(build_app(config), name=APP, route_prefix="/elastic")
    fleet = Fleet(cluster + "/elastic", APP)
    eventually(lambda: fleet.client.get("/ready").status_code == 200, timeout_s=120.0)
    yield fleet
    fleet.client.close()
    serve.delete(APP)


def test_replicas_follow_the_load(elastic: Fleet) -> None:
    async def load() -> None:
        body = {"model": "timed", "prompt": "a long story", "max_tokens": 900}
        async with httpx.AsyncClient(base_url=elastic.url, timeout=300.0) as client:
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(16)))
        assert {answer.status_code for answer in answers} == {200}

    assert elastic.num_ready() == 1
    clients = threading.Thread(target=lambda: asyncio.run(load()))
    clients.start()
    eventually(lambda: elastic.num_ready() == 2, timeout_s=90.0, period_s=0.5)
    clients.join(timeout=200.0)
    assert not clients.is_alive()
    eventually(lambda: elastic.num_ready() == 1, timeout_s=120.0, period_s=0.5)
