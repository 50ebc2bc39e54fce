"""LoRA adapters as clients see them: models of their own, configured or loaded at run time."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dspark_ray.core.clock import ManualClock
from dspark_ray.core.config import AppConfig, parse_app_config
from dspark_ray.core.errors import RequestError
from dspark_ray.core.types import Request
from dspark_ray.models.tokenizer import Tokenizer
from dspark_ray.serving.adapters import FRESH_MS, AdapterBook
from tests.fakes import FakeDirectory, FakeEngine, OneEngineFleet
from tests.local_app import LocalApp
from tests.tiny import tiny_tokenizer_dir
from tests.tiny_lora import write_adapter

BODY = {"prompt": "abc", "max_tokens": 3}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(tiny_tokenizer_dir(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of adapters: one that is configured, one that can be loaded, one that cannot, one outside."""
    folder = tmp_path_factory.mktemp("lora")
    write_adapter(folder / "always", "all")
    write_adapter(folder / "store" / "sql", "attention")
    write_adapter(folder / "store" / "dora", "attention", use_dora=True)
    write_adapter(folder / "outside", "rslora")
    return folder


def config(folder: Path, **lora: Any) -> AppConfig:
    adapters = [{"name": "always", "path": str(folder / "always")}]
    return parse_app_config(
        {
            "model": {"id": "m", "max_model_len": 64},
            "lora": {"adapters": adapters, "load_from": str(folder / "store"), **lora},
        }
    )


@pytest.fixture
async def app(tokenizer: Tokenizer, folder: Path) -> AsyncIterator[LocalApp]:
    settings = config(folder)
    app = LocalApp(tokenizer, FakeEngine(settings, step_ms=0.0), settings)
    yield app
    await app.settle()


async def post(app: LocalApp, route: str, **body: Any) -> tuple[int, dict[str, Any]]:
    response = await app.client.post(route, json=body)
    return response.status_code, response.json()


async def load(app: LocalApp, name: str = "sql", path: str = "sql") -> tuple[int, dict[str, Any]]:
    return await post(app, "/v1/load_lora_adapter", lora_name=name, lora_path=path)


def last_request(app: LocalApp) -> Request:
    return app.local.submitted[-1]


async def model_ids(app: LocalApp) -> dict[str, str | None]:
    """id → parent."""
    models = (await app.client.get("/v1/models")).json()["data"]
    return {model["id"]: model["parent"] for model in models}


async def test_an_adapter_is_chosen_by_its_name(app: LocalApp, folder: Path) -> None:
    for name in ("always", "m"):
        status, body = await post(app, "/v1/completions", model=name, **BODY)
        assert (status, body["model"]) == (200, name)
        adapter = last_request(app).adapter
        assert (adapter and (adapter.name, adapter.path)) == (
            None if name == "m" else ("always", str(folder / "always"))
        )
    messages = [{"role": "user", "content": "hello"}]
    status, body = await post(app, "/v1/chat/completions", model="always", messages=messages, max_tokens=3)
    assert (status, body["model"]) == (200, "always")
    status, body = await post(app, "/v1/responses", model="always", input="hello", max_output_tokens=16)
    assert (status, body["model"]) == (200, "always")
    assert (await post(app, "/tokenize", model="always", prompt="abc"))[0] == 200


async def test_adapters_are_models_with_a_parent(app: LocalApp) -> None:
    assert await model_ids(app) == {"m": None, "always": "m"}
    assert (await app.client.get("/v1/models/always")).json()["parent"] == "m"
    assert (await app.client.get("/v1/models/sql")).json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("name", [["sql"], {"a": 1}, 5, None, True])
async def test_a_model_that_is_no_name_is_refused(app: LocalApp, name: object) -> None:
    for route, field in (("/v1/completions", {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
        status, body = await post(app, route, model=name, **field)
        assert status in ((400, 404) if name is not None else (200, 400)), body


async def test_loaded_used_and_unloaded(app: LocalApp) -> None:
    status, body = await post(app, "/v1/completions", model="sql", **BODY)
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert "this server has 'm', 'always'" in body["error"]["message"]
    status, body = await load(app)
    assert (status, body["id"], body["parent"], body["replicas"]) == (200, "sql", "m", 1)
    assert [adapter.name for adapter in app.fleet.adapters] == ["sql"]
    assert await model_ids(app) == {"m": None, "always": "m", "sql": "m"}
    status, body = await post(app, "/v1/completions", model="sql", **BODY)
    assert (status, last_request(app).adapter) == (200, app.fleet.adapters[0])
    assert (await load(app))[0] == 200  # the same again
    status, body = await post(app, "/v1/unload_lora_adapter", lora_name="sql")
    assert (status, body["deleted"]) == (200, True)
    assert (await post(app, "/v1/completions", model="sql", **BODY))[0] == 404
    status, body = await post(app, "/v1/unload_lora_adapter", lora_name="sql")
    assert (status, body["error"]["code"]) == (404, "adapter_not_found")


@pytest.mark.parametrize(
    ("name", "path", "code"),
    [
        ("m", "sql", "adapter_exists"),
        ("always", "sql", "adapter_exists"),
        ("x", "../outside", "invalid_value"),
        ("x", "/etc", "invalid_value"),
        ("x", "a\0b", "invalid_value"),
        ("x", "x/" * 1500, "invalid_value"),
        ("x", "x" * 256, "invalid_adapter"),
        ("x", "nowhere", "invalid_adapter"),
        ("x", "dora", "invalid_adapter"),
        ("", "sql", "invalid_value"),
    ],
)
async def test_what_cannot_be_loaded(app: LocalApp, name: str, path: str, code: str) -> None:
    status, body = await load(app, name, path)
    assert (status, body["error"]["code"]) == (400, code)
    assert await model_ids(app) == {"m": None, "always": "m"}


async def test_a_name_is_taken_once(app: LocalApp, folder: Path) -> None:
    write_adapter(folder / "store" / "other", "rslora")
    assert (await load(app))[0] == 200
    status, body = await load(app, "sql", "other")
    assert (status, body["error"]["code"]) == (400, "adapter_exists")
    status, body = await post(app, "/v1/unload_lora_adapter", lora_name="always")
    assert (status, body["error"]["code"]) == (400, "adapter_configured")


async def test_an_engine_that_refuses_an_adapter_keeps_it_out(app: LocalApp) -> None:
    app.fleet.adapter_error = RequestError("its shapes are another model's", code="invalid_adapter")
    status, body = await load(app)
    assert (status, body["error"]["message"]) == (400, "its shapes are another model's")
    assert await model_ids(app) == {"m": None, "always": "m"}


async def test_the_routes_are_off_by_default(tokenizer: Tokenizer, folder: Path) -> None:
    settings = config(folder, load_from=None)
    app = LocalApp(tokenizer, FakeEngine(settings), settings)
    assert (await load(app))[0] == 404


async def test_every_ingress_process_learns_of_it(folder: Path) -> None:
    clock, directory, fleet = ManualClock(), FakeDirectory(), OneEngineFleet(None)
    here, there = (AdapterBook(config(folder), directory, fleet, clock) for _ in range(2))
    await here.load("sql", "sql")
    await there.look_up("sql")
    assert "sql" in there.known
    await here.unload("sql")
    await there.look_up("sql")
    assert "sql" in there.known  # for a second at most
    clock.advance(FRESH_MS)
    directory.is_down = True
    await there.look_up("sql")
    assert set(there.known) == {"always", "sql"}  # what is known can still be served
    directory.is_down = False
    await there.look_up("sql")
    assert set(there.known) == {"always"}
