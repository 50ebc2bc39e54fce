"""A drafter in shards (`parallel: fsdp`): every process holds a part of each matrix, of its average and of
its optimizer's moments, and gathers a layer's weights when it comes to it (torch's FSDP2).

Gradients are summed over the processes, not averaged: each process's loss is its share of the step's. What
is saved is whole, as one process would save it, so that a run continues with any number of processes.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from dspark_ray.models.drafters.families import DrafterNetwork
from dspark_ray.models.drafters.layers import MLP, Attention

# What training calls of a network and of an attention, beside `forward`: weights are gathered for these too.
_NETWORK_METHODS = (
    "context",
    "context_kv",
    "fuse",
    "markov_embedding",
    "markov_features",
    "logits",
    "confidence_logit",
)
_ATTENTION_METHODS = ("project_kv", "attend")


def shard_network(network: DrafterNetwork) -> None:
    """Leaves this process its shards, in place. All processes of the group call it, with equal weights."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in network.layers:
        attention, mlp = layer.self_attn, layer.mlp
        assert isinstance(attention, Attention)
        assert isinstance(mlp, MLP)
        for unit in (attention, mlp):
            fully_shard(unit, mesh=mesh)
        _register(attention, _ATTENTION_METHODS)
    fully_shard(network, mesh=mesh)
    _register(network, _NETWORK_METHODS)
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo scales no sums


def _register(module: torch.nn.Module, methods: tuple[str, ...]) -> None:
    for name in methods:
        if hasattr(module, name):
            register_fsdp_forward_method(module, name)


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This process's shards of them; whole tensors as they are."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def whole(value: Any, *, keep: bool = True) -> Any:
    """`value`, a nest of containers, with its shards gathered. All processes call it; those that do not
    `keep` what comes get empty tensors, and never hold more than one whole tensor."""

    def gather(shard: DTensor) -> Tensor:
        gathered = shard.full_tensor()
        return gathered if keep else gathered.new_empty(0)

    return tree_map_only(DTensor, gather, value)


def shards_like(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors cut as this process's `own` ones of the same names are."""
    return {name: shard_like(tensor, own[name]) for name, tensor in state.items()}


def shard_like(tensor: Tensor, own: Tensor) -> Tensor:
    """A whole tensor cut as this process's `own` one is, if that is a shard."""
    if not isinstance(own, DTensor):
        return tensor
    # Every process has read the whole tensor: none has to send it.
    return distribute_tensor(tensor, own.device_mesh, own.placements, src_data_rank=None)
