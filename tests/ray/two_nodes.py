"""An application over two Ray nodes of which one dies while everything streams. A process of its own, since
its cluster is: prints what happened as one line of JSON.

    python -m tests.ray.two_nodes MODEL_DIR
"""

import json
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster

from dspark_ray.core.config import parse_app_config
from dspark_ray.runtime.names import engine_prefix, serve_replica_prefix
from tests.ray.app_builder import build_fake_app
from tests.ray.conftest import Fleet, eventually
from tests.ray.test_faults import Stream

APP = "two-nodes"


def main(model_dir: Path) -> dict[str, Any]:
    # A place of its own: whoever starts Ray beside it must not find this cluster. Short, for sockets.
    folder = tempfile.mkdtemp(prefix="two-", dir="/tmp")
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80 << 20, "temp_dir": folder}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        return _lose_a_node(cluster, model_dir)
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _lose_a_node(cluster: Cluster, model_dir: Path) -> dict[str, Any]:
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=80 << 20) for _ in range(2)]
    ray.init(address=cluster.address, namespace="tests")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
    config = parse_app_config(
        {
            "model": {"id": "fake", "source": str(model_dir), "max_model_len": 4096},
            "engine": {"max_running": 16, "max_waiting": 16},
            "speculation": {"drafter": {"kind": "ngram"}},
            "serving": {"num_replicas": 2, "replica_cpus": 1},  # a node has room for one
        }
    )
    serve.run(build_fake_app(config), name=APP, route_prefix="/")
    fleet = Fleet(f"http://127.0.0.1:{port}", APP)
    eventually(lambda: fleet.num_ready() == 2, timeout_s=60.0)
    nodes_of = _nodes_of(engine_prefix(APP))
    streams = [Stream(fleet) for _ in range(8)]
    for stream in streams:
        assert stream.at_middle.wait(30.0)
    running = {name: stats.num_running for name, stats in fleet.stats().items()}
    # The ingress holds the clients' connections: its node is not the one that dies.
    (spared,) = _nodes_of(f"{serve_replica_prefix(APP)}Ingress#").values()
    victim = next(name for name, node_id in nodes_of.items() if node_id != spared)
    dying = next(node for node in nodes if node.node_id == nodes_of[victim])
    cluster.remove_node(dying, allow_graceful=False)
    for stream in streams:
        stream.check()
    left = fleet.stats()
    return {
        "nodes": len(set(nodes_of.values())),
        "lost_streams": running[victim],
        "whole_streams": len(streams),
        "replicas_left": len(left),
        "victim_is_gone": victim not in left,
    }


def _nodes_of(prefix: str) -> dict[str, str]:
    """The node that each living actor of such a name runs on."""
    actors = ray._private.state.actors().values()
    alive = [actor for actor in actors if actor["State"] == "ALIVE" and actor["Name"].startswith(prefix)]
    return {actor["Name"]: actor["Address"]["NodeID"] for actor in alive}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))), flush=True)
