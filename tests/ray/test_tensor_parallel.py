"""Several ranks through the real application: answers, lost ranks, two nodes, and that nothing is left."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from ray.util import list_named_actors, placement_group_table

from deployments.app import build_app
from dspark_ray.core.config import AppConfig, parse_app_config
from dspark_ray.core.types import Request, SamplingParams
from dspark_ray.engine.build import build_engine
from dspark_ray.engine.offline import generate_all
from dspark_ray.models.tokenizer import Tokenizer
from dspark_ray.runtime.names import NAMESPACE, engine_prefix, rank_name
from tests.ray.conftest import Fleet, eventually
from tests.tiny import tiny_chat_model_dir
from tests.tiny_engine import steep_table

PROMPT = "ab" * 20
NUM_TOKENS = 400
SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def shared_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four heads with two KV heads, in 12 layers: a step takes some milliseconds."""
    model_dir = tiny_chat_model_dir(tmp_path_factory.mktemp("shared"), num_hidden_layers=12)
    steep_table(16).save(model_dir / "table.json")
    return model_dir


def config_for(model_dir: Path, ranks: int, **engine: Any) -> AppConfig:
    return parse_app_config(
        {
            "model": {"id": "shared", "source": str(model_dir), "dtype": "float32", "max_model_len": 512},
            "engine": {
                "num_threads": 1,
                "kv_num_blocks": 256,
                "max_step_rows": 128,
                "tensor_parallel_size": ranks,
                **engine,
            },
            "speculation": {
                "drafter": {"kind": "ngram", "ngram_min": 1},
                "mode": "adaptive",
                "step_table": str(model_dir / "table.json"),  # profiling takes seconds
            },
        }
    )


@pytest.fixture(scope="module")
def expected(shared_model: Path) -> Callable[[int], str]:
    """The first tokens of what one process answers, as text."""
    engine = build_engine(config_for(shared_model, 1), model_dir=shared_model)
    tokenizer = Tokenizer.load(shared_model)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    (answer,) = generate_all(engine, [Request("r", tuple(tokenizer.encode(PROMPT)), sampling)], concurrency=1)
    return lambda num_tokens: tokenizer.decode(answer.token_ids[:num_tokens])


@contextlib.contextmanager
def served(url: str, name: str, config: AppConfig) -> Iterator[Fleet]:
    """The application; afterwards nothing of it is left, in Ray or outside."""
    segments = set(SHARED_MEMORY.glob("psm_*"))
    serve.run(build_app(config), name=name, route_prefix=f"/{name}")
    fleet = Fleet(f"{url}/{name}", name)
    try:
        yield fleet
    finally:
        fleet.client.close()
        serve.delete(name)
    eventually(lambda: not actors_of(name), timeout_s=15.0)
    eventually(lambda: set(SHARED_MEMORY.glob("psm_*")) <= segments, timeout_s=5.0)
    eventually(lambda: groups_of_pairs() <= {"REMOVED"}, timeout_s=10.0)


def groups_of_pairs() -> set[str]:
    """States of the placement groups that two ranks had."""
    return {group["state"] for group in placement_group_table().values() if len(group["bundles"]) == 2}


def actors_of(name: str) -> list[str]:
    """The engines of an application, and their ranks."""
    listed = [entry["name"] for entry in list_named_actors(all_namespaces=True)]
    return [actor for actor in listed if actor.startswith(engine_prefix(name))]


def complete(fleet: Fleet, **fields: Any) -> dict[str, Any]:
    body = {"model": "shared", "prompt": PROMPT, "temperature": 0, "ignore_eos": True, **fields}
    response = fleet.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def processes(fleet: Fleet) -> tuple[str, list[Any], list[int]]:
    """The engine's name, and the handles and process ids of it and its rank."""
    (name,) = fleet.engines()
    replica_id = name.removeprefix(engine_prefix(fleet.app_name))
    handles = [ray.get_actor(n, NAMESPACE) for n in (name, rank_name(fleet.app_name, replica_id, 1))]
    return name, handles, ray.get([handle.pid.remote() for handle in handles])


def is_alive(pid: int) -> bool:
    """Ended processes wait for their parent at most."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def check_journals(handles: list[Any]) -> None:
    """Both ranks were told the same."""
    first, second = ray.get([handle.journal.remote() for handle in handles])
    assert len(first) > 10
    assert first == second
    assert {entry.kind for entry in first} <= {"forward", "new_kv"}


class Stream(threading.Thread):
    """One answer, read in the background."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(daemon=True)
        self._fleet = fleet
        self.under_way = threading.Event()
        self.text, self.last = "", {}  # type: ignore[var-annotated]
        self.start()

    def run(self) -> None:
        body = {"model": "shared", "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "stream": True}
        with self._fleet.client.stream(
            "POST", "/v1/completions", json={**body, "max_tokens": NUM_TOKENS}, timeout=120.0
        ) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self.last = json.loads(line.removeprefix("data: "))
                    self.text += "".join(choice["text"] for choice in self.last.get("choices", ()))
                if len(self.text) > 30:
                    self.under_way.set()


def test_two_ranks_answer_and_a_killed_one_costs_no_token(
    cluster: str, shared_model: Path, expected: Callable[[int], str]
) -> None:
    with served(cluster, "pair", config_for(shared_model, 2)) as fleet:
        answer = complete(fleet, max_tokens=NUM_TOKENS)
        assert answer["choices"][0]["text"] == expected(NUM_TOKENS)
        assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
        before, handles, pids = processes(fleet)
        check_journals(handles)

        # In the middle of an answer, the rank that follows.
        stream = Stream(fleet)
        assert stream.under_way.wait(30.0)
        os.kill(pids[1], signal.SIGKILL)
        eventually(lambda: not any(map(is_alive, pids)), timeout_s=10.0)
        stream.join(60.0)
        assert stream.text == expected(NUM_TOKENS), stream.last
        eventually(lambda: fleet.num_ready() == 1 and before not in fleet.engines(), timeout_s=60.0)
        after, _, pids = processes(fleet)

        # While nobody asks for anything, rank 0.
        os.kill(pids[0], signal.SIGKILL)
        eventually(lambda: not any(map(is_alive, pids)), timeout_s=10.0)
        eventually(lambda: fleet.num_ready() == 1 and after not in fleet.engines(), timeout_s=60.0)
        assert complete(fleet, max_tokens=20)["choices"][0]["text"] == expected(20)
        _, _, pids = processes(fleet)
    eventually(lambda: not any(map(is_alive, pids)), timeout_s=5.0)


@pytest.fixture
def second_node(cluster: str) -> Iterator[None]:
    """Another node of the cluster, with processes of its own."""
    before = len(ray.nodes())
    address = ray.get_runtime_context().gcs_address
    command = ["start", f"--address={address}", "--num-cpus=2", "--block", "--disable-usage-stats"]
    node = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", *command, "--object-store-memory=100000000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually(lambda: len(ray.nodes()) > before, timeout_s=60.0)
        yield
    finally:
        node.terminate()
        node.wait(30.0)


@pytest.mark.usefixtures("second_node")
def test_ranks_on_two_nodes_answer_a_chat(
    cluster: str, shared_model: Path, expected: Callable[[int], str]
) -> None:
    config = config_for(shared_model, 2, rank_placement="STRICT_SPREAD")
    with served(cluster, "spread", config) as fleet:
        body = {"model": "shared", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12}
        answer = fleet.client.post("/v1/chat/completions", json={**body, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 12
        assert complete(fleet, max_tokens=60)["choices"][0]["text"] == expected(60)
        _, handles, _ = processes(fleet)
        check_journals(handles)
        groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
        (nodes,) = [set(g["bundles_to_node_id"].values()) for g in groups if len(g["bundles"]) == 2]
        assert len(nodes) == 2
