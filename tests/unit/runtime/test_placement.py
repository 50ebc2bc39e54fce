"""The placement group of a replica: one, whatever the engine, and nothing nested in it."""

from typing import Any

import pytest

from dspark_ray.core.config import parse_app_config
from dspark_ray.runtime.names import engine_name, is_engine_name, rank_name
from dspark_ray.runtime.placement import Placement, replica_placement


def placement(kind: str = "vllm", cpus: float = 2.0, **vllm: Any) -> Placement:
    args = {"engine": {"kind": kind}, "serving": {"replica_cpus": cpus}, "vllm": vllm}
    return replica_placement(parse_app_config(args))


def test_engines_on_a_cpu_take_one_bundle() -> None:
    for found in (placement("native"), placement(device="cpu")):
        assert found == Placement(({"CPU": 2.0},), "STRICT_PACK")
    assert placement("native", cpus=0.0).bundles[0]["CPU"] > 0  # Ray takes no empty bundle


def test_a_native_engine_on_a_gpu_reserves_it() -> None:
    config = parse_app_config({"model": {"device": "cuda"}, "serving": {"replica_cpus": 2.0}})
    assert replica_placement(config) == Placement(
        ({"CPU": 2.0, "GPU": 1.0},), "STRICT_PACK", {"num_gpus": 1.0}
    )


@pytest.mark.parametrize("strategy", ["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"])
def test_our_ranks_have_a_bundle_each(strategy: str) -> None:
    engine = {"tensor_parallel_size": 3, "rank_placement": strategy}
    found = replica_placement(parse_app_config({"engine": engine, "serving": {"replica_cpus": 2.0}}))
    assert found == Placement(({"CPU": 2.0},) * 3, strategy, num_ranks=3)


def test_our_ranks_on_gpus_reserve_one_each() -> None:
    args = {
        "model": {"device": "cuda"},
        "engine": {"tensor_parallel_size": 2, "rank_placement": "PACK"},
        "serving": {"replica_cpus": 2.0},
    }
    found = replica_placement(parse_app_config(args))
    assert found == Placement(({"CPU": 2.0, "GPU": 1.0},) * 2, "PACK", {"num_gpus": 1.0}, num_ranks=2)


def test_ranks_that_are_processes_share_the_engines_bundle() -> None:
    found = placement(tensor_parallel_size=2, data_parallel_size=2)
    assert found.bundles == ({"CPU": 2.0, "GPU": 4.0},)
    assert found.actor_options == {"num_gpus": 4.0}
    assert not found.captures_children


def test_ranks_that_are_actors_have_a_bundle_each() -> None:
    found = placement(tensor_parallel_size=2, pipeline_parallel_size=2, executor="ray")
    assert found.bundles == ({"CPU": 2.0}, *({"CPU": 1.0, "GPU": 1.0},) * 4)
    assert found.strategy == "PACK"
    assert found.captures_children  # they land in the replica's group
    assert found.actor_options == {}


def test_ranks_are_named_after_their_engine_and_are_none() -> None:
    engine, rank = engine_name("app", "r1"), rank_name("app", "r1", 2)
    assert rank == f"{engine}:rank2"
    assert is_engine_name("app", engine)
    assert not is_engine_name("app", rank)
    assert not is_engine_name("ap", engine)
