"""What a replica reserves: one placement group, made by Serve, in which its engine and all ranks live."""

from dataclasses import dataclass, field
from typing import Any

from dspark_ray.core.config import AppConfig

_MIN_CPUS = 0.01  # Ray takes no empty bundle


@dataclass(frozen=True, slots=True)
class Placement:
    """Of one replica. The engine actor takes bundle 0."""

    bundles: tuple[dict[str, float], ...]
    strategy: str  # Ray's
    actor_options: dict[str, Any] = field(default_factory=dict)  # of each rank, beside its CPUs
    captures_children: bool = False  # whether actors that the engine starts land in the group
    num_ranks: int = 1  # of ours, the engine's actor included; rank r takes bundle r


def replica_placement(config: AppConfig) -> Placement:
    """The bundles of a configuration's replicas.

    Ours: a bundle for each rank, by default all on one node, with a GPU each where `model.device` is cuda.
    vLLM by `mp`: its ranks are processes of the engine actor, which therefore holds all GPUs, on one node.
    By `ray`: a bundle with one GPU each, over as few nodes as will do; vLLM finds the group as the one that
    its engine runs in, and makes none of its own.
    """
    engine_cpus = max(config.serving.replica_cpus, _MIN_CPUS)
    vllm, ranks = config.vllm, config.engine.tensor_parallel_size
    if config.engine.kind == "native" and config.model.device == "cuda":
        bundle, options = {"CPU": engine_cpus, "GPU": 1.0}, {"num_gpus": 1.0}
        strategy = config.engine.rank_placement if ranks > 1 else "STRICT_PACK"
        return Placement((bundle,) * ranks, strategy, options, num_ranks=ranks)
    if ranks > 1:
        return Placement(({"CPU": engine_cpus},) * ranks, config.engine.rank_placement, num_ranks=ranks)
    if config.engine.kind != "vllm" or vllm.device == "cpu":
        return Placement(({"CPU": engine_cpus},), "STRICT_PACK")
    if vllm.executor == "mp":
        gpus = float(vllm.world_size)
        return Placement(({"CPU": engine_cpus, "GPU": gpus},), "STRICT_PACK", {"num_gpus": gpus})
    gpus_of_ranks = tuple({"CPU": 1.0, "GPU": 1.0} for _ in range(vllm.world_size))
    return Placement(({"CPU": engine_cpus}, *gpus_of_ranks), "PACK", captures_children=True)
