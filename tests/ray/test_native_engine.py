"""The shipped builder with a tiny random model: real engines, profiled, behind the real application."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray import serve

from deployments.app import build_app
from dspark_ray.core.config import parse_app_config
from tests.ray.conftest import Fleet, eventually
from tests.tiny_lora import adapter_tensors, write_adapter

ATTENTION = {"self_attn.q_proj": (64, 64), "self_attn.v_proj": (32, 64)}  # of tests.tiny's models
APP = "native"
PROMPT = "ab" * 20
CAP = 100.0


@pytest.fixture(scope="module")
def native(cluster: str, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    store = tmp_path_factory.mktemp("lora")
    write_adapter(store / "sql", "attention", adapter_tensors("attention", ATTENTION))
    write_adapter(store / "other", "attention")  # for a target of other shapes
    config = parse_app_config(
        {
            "model": {"id": "tiny", "source": str(model_dir), "dtype": "float32", "max_model_len": 512},
            "engine": {"num_threads": 1, "kv_num_blocks": 256, "max_step_rows": 128},
            "speculation": {
                "drafter": {"kind": "ngram"},
                "mode": "fixed",
                "hot_swap": {"load_from": str(store)},
            },
            "lora": {"load_from": str(store)},
            "scheduler": {"policy": "shared_cap", "cap_draft_tokens_per_s": CAP},
        }
    )
    serve.run(build_app(config), name=APP, route_prefix="/native")
    fleet = Fleet(cluster + "/native", APP)
    yield fleet
    fleet.client.close()
    serve.delete(APP)


def _complete(fleet: Fleet, **fields: object) -> dict:
    body = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "ignore_eos": True, **fields}
    response = fleet.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_real_engine_drafts_verifies_and_follows_the_cap(native: Fleet) -> None:
    eventually(lambda: native.client.get("/ready").status_code == 200)
    first = _complete(native, max_tokens=60)
    assert first["usage"]["completion_tokens"] == 60
    assert _complete(native, max_tokens=60)["choices"] == first["choices"]
    details = first["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] > 0
    (stats,) = native.stats().values()
    counters = stats.counters
    assert counters.drafted_tokens == counters.verified_tokens + counters.trimmed_tokens
    assert counters.verified_tokens == counters.accepted_tokens + counters.rejected_tokens
    eventually(lambda: all(s.plan_age_ms is not None for s in native.stats().values()), timeout_s=10.0)
    (replica,) = ray.get(native.scheduler().state.remote())["replicas"].values()
    assert replica["draft_tokens_per_s"] == CAP
    assert replica["table"]


def test_a_stop_string_gives_back_everything(native: Fleet) -> None:
    text = _complete(native, max_tokens=40)["choices"][0]["text"]
    stop = text[10:13]
    cut = _complete(native, max_tokens=400, stop=stop)
    assert cut["choices"][0]["text"] == text[: text.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    eventually(native.is_idle, timeout_s=5.0)
    (stats,) = eventually(lambda: [s for s in native.stats().values() if not s.kv_used_blocks], timeout_s=5.0)
    assert stats.num_aborted >= 1


def test_a_grammar_travels_from_the_ingress_to_the_engine(native: Fleet) -> None:
    for fields in ({"guided_regex": "[0-9]{3}-[0-9]{4}"}, {"guided_choice": ["left", "right"]}):
        answer = _complete(native, ignore_eos=False, max_tokens=20, temperature=1.0, **fields)
        choice = answer["choices"][0]
        assert re.fullmatch(r"\d{3}-\d{4}|left|right", choice["text"])
        assert choice["finish_reason"] == "stop"
    body = {"model": "tiny", "prompt": PROMPT, "guided_grammar": "root ::= x"}
    refused = native.client.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_grammar")


def test_an_adapter_is_loaded_used_and_unloaded_at_run_time(native: Fleet) -> None:
    def post(route: str, **body: str) -> tuple[int, dict]:
        response = native.client.post(f"/v1/{route}_lora_adapter", json=body)
        return response.status_code, response.json()

    status, body = post("load", lora_name="other", lora_path="other")
    assert (status, body["error"]["code"]) == (
        400,
        "invalid_adapter",
    )  # by the engine, by its shapes
    status, body = post("load", lora_name="sql", lora_path="sql")
    assert (status, body["parent"], body["replicas"]) == (200, "tiny", 1)
    adapted = _complete(native, model="sql", max_tokens=30)
    assert adapted["model"] == "sql"
    assert adapted["choices"][0]["text"] != _complete(native, max_tokens=30)["choices"][0]["text"]
    models = [model["id"] for model in native.client.get("/v1/models").json()["data"]]
    assert models == ["tiny", "sql"]
    assert post("unload", lora_name="sql")[0] == 200
    gone = native.client.post("/v1/completions", json={"model": "sql", "prompt": PROMPT})
    assert gone.status_code == 404


def test_a_drafter_that_is_none_is_refused_by_the_engine(native: Fleet) -> None:
    order = {"path": "sql", "kind": "dspark"}  # an adapter
    refused = native.client.post("/v1/drafter/swap", json=order)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_drafter")
    (state,) = native.client.get("/v1/drafter").json()["replicas"]
    assert state["status"] == "none"
    ended = native.client.post("/v1/drafter/promote")
    assert (ended.status_code, ended.json()["error"]["code"]) == (409, "no_trial")
