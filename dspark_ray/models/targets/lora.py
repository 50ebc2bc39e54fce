"""LoRA adapters of the target: several in one batch, beside the model's own fused weights.

A fused matrix (Q, K and V; gate and up) has one low-rank product: the A of its parts lie one below the
other, B is zero where a part's rank does not belong to its outputs. All adapters of a batch are packed in the
same way, so a batch takes two products a matrix, whatever the number of its adapters or requests; between
them, a mask keeps the ranks of a row's own adapter. A masked rank is an exact zero in every sum, so a row's
result does not depend on which adapters lie beside its own.

A tensor-parallel rank holds the same part of an adapter as of the matrix under it: B's outputs where that is
divided by columns (QKV, gate-up), A's inputs where it is divided by rows (o, down), whose sum over ranks
then holds the adapter's product, too.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from dspark_kernels.linear import PackedLinear
from torch import Tensor

from dspark_ray.core.errors import CheckpointError
from dspark_ray.core.types import AdapterRef
from dspark_ray.models.targets.config import DecoderConfig
from dspark_ray.models.targets.lora_checkpoint import (
    WEIGHTS_FILE,
    AdapterSettings,
    adapter_digest,
    read_settings,
)
from dspark_ray.models.targets.shard import WHOLE, Shard, Span
from dspark_ray.models.weights import CPU, WeightSource, open_tensors

_PREFIX = "base_model.model.model.layers"
NO_ADAPTER = -1


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to one fused matrix: B·A, scaled."""

    a: Tensor  # [K, in]
    b: Tensor  # [out, K]

    def to(self, device: torch.device) -> "LowRank":
        """The same product on that device."""
        return LowRank(self.a.to(device), self.b.to(device))


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter in memory, as the decoder's fused matrices take it."""

    ref: AdapterRef
    rank: int
    layers: tuple[dict[str, LowRank], ...]  # by matrix, those that any layer of it adapts

    @property
    def num_bytes(self) -> int:
        tensors = [t for layer in self.layers for low in layer.values() for t in (low.a, low.b)]
        return sum(t.numel() * t.element_size() for t in tensors)


def load_adapter(
    ref: AdapterRef,
    config: DecoderConfig,
    dtype: torch.dtype,
    max_rank: int,
    device: torch.device = CPU,
    shard: Shard = WHOLE,
) -> Adapter:
    """Reads a rank's part of an adapter for the target of `config`. Raises `CheckpointError` for one that
    does not fit, has settings that are not carried out, or is no longer what `ref` says.
    """
    path = Path(ref.path)
    settings = read_settings(path, max_rank)
    if adapter_digest(path) != ref.digest:
        raise CheckpointError(f"the adapter {path} has changed since it was made known; load it again")
    tensors = open_tensors(path / WEIGHTS_FILE)
    source = WeightSource(tensors, dtype=torch.float32)
    try:
        matrices = _adapted(config, shard, tensors.keys())
        layers = tuple(
            {
                matrix: _fused(source, f"{_PREFIX}.{index}", parts, settings, dtype).to(device)
                for matrix, parts in matrices.items()
            }
            for index in range(config.num_layers)
        )
        source.finish()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return Adapter(ref, settings.rank, layers)


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the matrices that a fused one is made of."""

    module: str
    num_inputs: int  # as stored, of all ranks
    num_outputs: int
    inputs: Span  # this rank's
    outputs: Span
    first_output: int  # in this rank's fused matrix
    total_outputs: int  # of this rank's fused matrix


def _adapted(config: DecoderConfig, shard: Shard, names: Collection[str]) -> dict[str, list[_Part]]:
    """The fused matrices of which some layer has a tensor, each with the parts that are adapted."""
    spans, hidden = shard.spans(config), config.hidden_size
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    all_hidden = (hidden, Span(0, hidden))
    q, k_or_v, up = (heads, spans.q), (kv, spans.kv), (inner, spans.inner)
    fused = {  # inputs, then the outputs of each part: all of them, and this rank's
        "qkv": (all_hidden, {"self_attn.q_proj": q, "self_attn.k_proj": k_or_v, "self_attn.v_proj": k_or_v}),
        "o": (q, {"self_attn.o_proj": all_hidden}),
        "gate_up": (all_hidden, {"mlp.gate_proj": up, "mlp.up_proj": up}),
        "down": (up, {"mlp.down_proj": all_hidden}),
    }
    matrices: dict[str, list[_Part]] = {}
    for matrix, ((num_inputs, inputs), modules) in fused.items():
        first, total = 0, sum(outputs.size for _, outputs in modules.values())
        for module, (num_outputs, outputs) in modules.items():
            if any(f".{module}.lora_A." in name for name in names):
                part = _Part(module, num_inputs, num_outputs, inputs, outputs, first, total)
                matrices.setdefault(matrix, []).append(part)
            first += outputs.size
    return matrices


def _fused(
    source: WeightSource, layer: str, parts: Sequence[_Part], settings: AdapterSettings, dtype: torch.dtype
) -> LowRank:
    """The parts of one layer's matrix as one product; those that this layer does not adapt are zeros."""
    rank = settings.rank
    width = rank + rank % 2  # the compiled product takes inputs in pairs
    a = torch.zeros(len(parts) * width, parts[0].inputs.size)
    b = torch.zeros(parts[0].total_outputs, len(parts) * width)
    for number, part in enumerate(parts):
        name = f"{layer}.{part.module}"
        down = source.take_optional(f"{name}.lora_A.weight", (rank, part.num_inputs), part.inputs.along(1))
        if down is None:
            continue
        up = source.take(f"{name}.lora_B.weight", (part.num_outputs, rank), part.outputs.along(0))
        first = number * width
        a[first : first + rank] = down
        outputs = slice(part.first_output, part.first_output + part.outputs.size)
        b[outputs, first : first + rank] = up * settings.scaling
    return LowRank(a.to(dtype), b.to(dtype))


@dataclass(frozen=True, slots=True)
class _Packed:
    """The low-rank products of one matrix for all adapters of a pack."""

    shrink: PackedLinear  # [N, in] → [N, ΣK]
    grow: PackedLinear  # [N, ΣK] → [N, out]


class AdapterPack:
    """Some adapters side by side; a batch may use any of them."""

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        assert adapters, "a pack without adapters"
        self.digests = tuple(adapter.ref.digest for adapter in adapters)
        self.total_rank = sum(adapter.rank for adapter in adapters)
        self._owners: dict[str, Tensor] = {}  # by matrix [ΣK]: which adapter each rank is of
        self._layers: list[dict[str, _Packed]] = []
        for index in range(len(adapters[0].layers)):
            packed = {}
            for matrix in dict.fromkeys(name for adapter in adapters for name in adapter.layers[index]):
                of = [
                    (i, one.layers[index][matrix])
                    for i, one in enumerate(adapters)
                    if matrix in one.layers[index]
                ]
                packed[matrix] = _Packed(
                    PackedLinear(torch.cat([low.a for _, low in of])),
                    PackedLinear(torch.cat([low.b for _, low in of], dim=1)),
                )
                self._owners[matrix] = torch.cat(
                    [torch.full((len(low.a),), i, device=low.a.device) for i, low in of]
                )
            self._layers.append(packed)

    def rows(self, adapters: Tensor, dtype: torch.dtype) -> "AdapterRows":
        """For one batch. adapters [N]: each row's place in `digests`, or `NO_ADAPTER`"""
        masks = {
            matrix: (owners == adapters.unsqueeze(1)).to(dtype) for matrix, owners in self._owners.items()
        }
        return AdapterRows(self._layers, masks, adapters)


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The adapters of one batch, as the decoder applies them."""

    layers: Sequence[dict[str, _Packed]]
    masks: dict[str, Tensor]  # by matrix [N, ΣK]: 1 where a rank is of the row's own adapter, else 0
    adapters: Tensor  # [N] int64, each row's place in the pack's `digests`, or `NO_ADAPTER`

    def add(self, layer: int, matrix: str, x: Tensor, out: Tensor) -> Tensor:
        """`out` [N, out] of the model's own matrix, and what the rows' adapters make of `x` [N, in]."""
        packed = self.layers[layer].get(matrix)
        if packed is None:
            return out
        return out.add_(packed.grow(packed.shrink(x).mul_(self.masks[matrix])))
