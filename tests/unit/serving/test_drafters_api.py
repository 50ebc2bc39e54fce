"""The drafter's routes, and the command that calls them."""

from pathlib import Path
from typing import Any

import pytest

from dspark_ray.cli.swap_drafter import describe
from dspark_ray.core.config import AppConfig, parse_app_config
from dspark_ray.models.tokenizer import Tokenizer
from tests.fakes import FakeEngine
from tests.local_app import LocalApp
from tests.tiny import tiny_tokenizer_dir


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(tiny_tokenizer_dir(tmp_path_factory.mktemp("tokenizer")))


def config(load_from: Path | None) -> AppConfig:
    hot_swap = {"load_from": None if load_from is None else str(load_from)}
    return parse_app_config({"model": {"id": "m"}, "speculation": {"hot_swap": hot_swap}})


def app_of(tokenizer: Tokenizer, load_from: Path | None) -> LocalApp:
    return LocalApp(tokenizer, FakeEngine(config(load_from)), config(load_from))


async def post(app: LocalApp, route: str, **body: Any) -> tuple[int, dict[str, Any]]:
    response = await app.client.post(f"/v1/drafter/{route}", json=body)
    return response.status_code, response.json()


async def test_tried_and_promoted_or_rolled_back(tokenizer: Tokenizer, tmp_path: Path) -> None:
    app = app_of(tokenizer, tmp_path)
    for end, status in (("promote", "promoted"), ("roll_back", "rolled_back")):
        code, body = await post(app, "swap", path="new", temperatures="new/t.json", share=0.3)
        (state,) = body["replicas"]
        assert (code, state["id"], state["status"]) == (200, "replica", "trial")
        assert state["order"]["path"] == str(tmp_path / "new")
        assert state["order"]["temperatures"] == str(tmp_path / "new" / "t.json")
        assert (state["order"]["share"], state["order"]["automatic"]) == (0.3, True)
        code, body = await post(app, end)
        assert (code, body["replicas"][0]["status"]) == (200, status)
        assert (await app.client.get("/v1/drafter")).json() == body
        assert describe(body["replicas"][0])[0] == f"replica: {status}: by hand"
        assert "candidate τ 1.50 on 9 drafts" in describe(body["replicas"][0])[2]


async def test_what_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    app = app_of(tokenizer, tmp_path)
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "invalid_value"),
        ({"path": "../outside"}, "invalid_value"),
        ({"path": "new", "temperatures": "/etc/passwd"}, "invalid_value"),
        ({"path": "new", "share": 1.0}, "invalid_value"),
        ({"path": 3}, "invalid_type"),
    ]
    for body, error in refused:
        code, answer = await post(app, "swap", **body)
        assert (code, answer["error"]["code"]) == (400, error)
    code, answer = await post(app, "promote")
    assert (code, answer["error"]["code"]) == (409, "no_trial")


async def test_the_routes_are_off_by_default(tokenizer: Tokenizer) -> None:
    app = app_of(tokenizer, None)
    assert (await post(app, "swap", path="new"))[0] == 404
    assert (await app.client.get("/v1/drafter")).status_code == 404
