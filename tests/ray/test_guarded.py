"""API keys in front of the real application, and what its log files say of requests."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve

from dspark_ray.core.config import parse_app_config
from dspark_ray.serving.api_keys import digest_of, new_key
from tests.fakes import POISON_TOKEN
from tests.ray.app_builder import build_fake_app
from tests.ray.conftest import Fleet, eventually

APP = "guarded"
KEY, ADMIN = new_key(), new_key()
MARKER = "xylophonic zebras"


@pytest.fixture(scope="module")
def guarded(cluster: str, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    keys = [
        {"name": "user", "sha256": digest_of(KEY), "concurrent_requests": 1},
        {"name": "root", "sha256": digest_of(ADMIN), "admin": True},
    ]
    keys_file = tmp_path_factory.mktemp("keys") / "keys.jsonl"
    keys_file.write_text("".join(json.dumps(key) + "\n" for key in keys))
    config = parse_app_config(
        {
            "model": {"id": "fake", "source": str(model_dir), "max_model_len": 4096},
            "engine": {"max_running": 4, "max_waiting": 4},
            "speculation": {"drafter": {"kind": "ngram"}},
            "security": {"api_keys_file": str(keys_file)},
        }
    )
    serve.run(build_fake_app(config), name=APP, route_prefix="/guarded")
    fleet = Fleet(cluster + "/guarded", APP)
    eventually(lambda: fleet.client.get("/ready").status_code == 200, timeout_s=60.0)
    yield fleet
    fleet.client.close()
    serve.delete(APP)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(fleet: Fleet, key: str = KEY, **fields: Any) -> httpx.Response:
    body = {"model": "fake", "prompt": "abc", "max_tokens": 6, **fields}
    return fleet.client.post("/v1/completions", json=body, headers=bearer(key))


def test_keys_hold_below_a_route_prefix(guarded: Fleet) -> None:
    assert guarded.client.get("/v1/models").status_code == 401
    assert guarded.client.get("/v1/models", headers=bearer(KEY)).status_code == 200
    assert guarded.client.get("/health").status_code == 200
    assert guarded.client.get("/metrics", headers=bearer(KEY)).status_code == 403
    assert guarded.client.get("/metrics", headers=bearer(ADMIN)).status_code == 200
    assert ask(guarded).status_code == 200


def test_a_stream_runs_until_its_last_byte(guarded: Fleet) -> None:
    body = {"model": "fake", "prompt": "abc", "max_tokens": 3000, "stream": True}
    with guarded.client.stream("POST", "/v1/completions", json=body, headers=bearer(KEY)) as response:
        lines = response.iter_lines()  # kept: the client leaves with it
        next(lines)
        assert ask(guarded).status_code == 429
        assert ask(guarded, ADMIN).status_code == 200
    eventually(lambda: ask(guarded).status_code == 200)  # the client has left


def test_no_log_file_holds_a_prompt_or_a_key(guarded: Fleet) -> None:
    """Refused, answered and failed requests. Last of all: the failed one takes its engines down."""
    told = guarded.client.post("/tokenize", json={"model": "fake", "prompt": MARKER}, headers=bearer(KEY))
    token_ids = told.json()["tokens"]
    assert len(token_ids) >= 4
    assert ask(guarded, prompt=MARKER).status_code == 200
    assert ask(guarded, prompt=MARKER, stream=True).status_code == 200
    assert ask(guarded, prompt=MARKER, top_p=MARKER).status_code == 400
    assert ask(guarded, prompt=MARKER, max_tokens=5000).status_code == 400
    assert ask(guarded, "dsk-" + MARKER.replace(" ", ""), prompt=MARKER).status_code == 401
    assert ask(guarded, prompt=[POISON_TOKEN, *token_ids]).status_code == 500
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    texts = {path: path.read_text(errors="replace") for path in logs.rglob("*") if path.is_file()}
    assert any("a step failed" in text for text in texts.values())  # it is where faults are told
    words = (MARKER, MARKER.replace(" ", ""), str(token_ids)[1:-1], KEY, ADMIN)
    assert [(path.name, word) for path, text in texts.items() for word in words if word in text] == []
