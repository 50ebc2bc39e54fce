"""Checkpoints with matrices in 8 bits, as compressed-tensors and torchao write them: read as what they stand
for.

A matrix X of compressed-tensors is stored as `X.weight` (float8 or int8) or, four values an int32, as
`X.weight_packed` with `X.weight_shape`, and `X.weight_scale`: one scale for all, one an output, or one for
each group of inputs. One of torchao, in safetensors: as `X._weight_qdata` and `X._weight_scale`.
What a model takes is weight · scale in its own type; whether it keeps them in 8 bits is `model.quantization`.
Activations stay as they are, also where a checkpoint was made for 8-bit ones: that is the more exact
reading.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark_ray.core.errors import CheckpointError, ConfigError
from dspark_ray.models.weights import CPU, Part, StoredTensor, WeightSource, open_safetensors, read_tensor

_STRATEGIES = ("tensor", "channel", "group")
_EXTRAS = ("weight_scale", "weight_packed", "weight_shape", "input_scale")
_TORCHAO_TYPES = (
    "Int8WeightOnlyConfig",
    "Float8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Float8DynamicActivationFloat8WeightConfig",
)
_TORCHAO_FIELDS = {"qdata": "weight", "scale": "weight_scale", "act_quant_scale": "input_scale"}
_PACKED_VALUES = 4  # in an int32, the first in the lowest bits, each plus 128


def open_weights(model_dir: Path, *, device: torch.device = CPU) -> WeightSource:
    """The weights of a model directory, dequantised where they have to be. `ConfigError` for a quantisation
    that is not read."""
    try:
        raw = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {model_dir / 'config.json'}: {error}") from error
    tensors = open_safetensors(model_dir)
    settings = raw.get("quantization_config") or raw.get("compression_config")
    if not settings:
        return WeightSource(tensors, device=device)
    check_supported(settings)
    if settings["quant_method"] == "torchao":
        tensors = _from_torchao(tensors)
    return QuantizedSource(tensors, device=device)


def check_supported(settings: Mapping[str, Any]) -> None:
    """`ConfigError` for a config.json's quantization_config that `QuantizedSource` cannot read."""
    method = settings.get("quant_method")
    if method == "torchao":
        _check_torchao(settings)
        return
    if method != "compressed-tensors":
        raise ConfigError(
            f"quantization_config.quant_method {method!r} is not read by the native engine: use a checkpoint "
            "of compressed-tensors or torchao (FP8 or int8), the unquantised one with model.quantization, or "
            "engine.kind vllm"
        )
    for name, group in (settings.get("config_groups") or {}).items():
        weights = group.get("weights") or {}
        wrong = [
            f"{key} {weights.get(key)!r}"
            for key, known in (("num_bits", (8,)), ("strategy", _STRATEGIES), ("symmetric", (True,)))
            if weights.get(key) not in known
        ]
        if wrong:
            raise ConfigError(
                f"quantization_config.config_groups.{name}: {', '.join(wrong)}: the native engine reads "
                f"8 bits, symmetric, by {', '.join(_STRATEGIES)}"
            )


def _check_torchao(settings: Mapping[str, Any]) -> None:
    """By the names of its configurations, one for all modules or one for some of each; what they hold is
    seen when the tensors are read."""
    kinds = settings.get("quant_type")
    named = kinds.values() if isinstance(kinds, Mapping) else [kinds]
    for kind in named:
        name = kind.get("_type") if isinstance(kind, Mapping) else kind
        if name not in _TORCHAO_TYPES:
            raise ConfigError(
                f"quantization_config.quant_type {str(name)[:64]!r} of torchao is not read by the native "
                f"engine: it reads {', '.join(_TORCHAO_TYPES)}"
            )


def _from_torchao(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """By the names of compressed-tensors."""
    found: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        module, _, field = name.rpartition("._weight_")
        if not module:
            found[name] = stored
        elif field == "zero_point":
            if read_tensor(stored, None).count_nonzero():
                raise CheckpointError(f"{name} is not zero: the native engine reads symmetric 8 bits")
        elif field in _TORCHAO_FIELDS:
            found[f"{module}.{_TORCHAO_FIELDS[field]}"] = stored
        else:
            raise CheckpointError(f"{name}: the native engine reads no {field!r} of torchao")
    return found


class QuantizedSource(WeightSource):
    """Hands out weight · scale, in fp32, for every matrix that has a scale."""

    def take_optional(self, name: str, shape: Sequence[int], part: Part | None = None) -> Tensor | None:
        module = name.removesuffix(".weight")
        if not name.endswith(".weight") or f"{module}.weight_scale" not in self:
            return super().take_optional(name, shape, part)
        assert name not in self._taken, f"tensor {name!r} is taken twice"
        self._taken |= {name, *(f"{module}.{extra}" for extra in _EXTRAS)}
        return self._cast(self._dequantised(module, shape, part))

    def whole(self, name: str) -> Tensor:
        module = name.removesuffix(".weight")
        if f"{module}.weight_scale" not in self:
            return super().whole(name)
        return self._cast(self._dequantised(module, None, None))

    def _dequantised(self, module: str, shape: Sequence[int] | None, part: Part | None) -> Tensor:
        values = self._values(module, shape, part)
        scale = self._read(f"{module}.weight_scale").float()
        stored = tuple(self._shape(module))
        if scale.numel() == 1:
            return values.float() * scale.reshape(())
        if scale.dim() == 1:
            scale = scale.unsqueeze(1)
        if scale.dim() != 2 or scale.shape[0] != stored[0] or stored[1] % scale.shape[1]:
            raise CheckpointError(
                f"{module}.weight_scale has shape {list(scale.shape)}, which no {list(stored)} matrix has"
            )
        whole = scale.expand(*stored) if scale.shape[1] == 1 else _by_group(scale, stored[1])
        return values.float() * (whole if part is None else whole.narrow(part.dim, part.start, _length(part)))

    def _values(self, module: str, shape: Sequence[int] | None, part: Part | None) -> Tensor:
        """The 8-bit numbers, of a part."""
        packed = f"{module}.weight_packed" in self
        stored = tuple(self._shape(module))
        if shape is not None and stored != tuple(shape):
            raise CheckpointError(
                f"tensor '{module}.weight' has shape {list(stored)}, the config asks for {list(shape)}"
            )
        if not packed:
            values = read_tensor(self._tensors[f"{module}.weight"], part)
            if values.element_size() != 1:  # saved uncompressed: already what values times scale make
                raise CheckpointError(
                    f"{module}.weight is {values.dtype} beside a weight_scale: save the checkpoint compressed"
                )
            return values
        words = self._read(f"{module}.weight_packed")
        values = torch.stack([(words >> 8 * place) & 0xFF for place in range(_PACKED_VALUES)], dim=-1)
        whole = values.flatten(1)[:, : stored[1]] - 128
        return whole if part is None else whole.narrow(part.dim, part.start, _length(part))

    def _shape(self, module: str) -> Sequence[int]:
        if f"{module}.weight_packed" in self:
            return [int(size) for size in self._read(f"{module}.weight_shape").tolist()]
        if f"{module}.weight" not in self:
            raise CheckpointError(f"{module} has a weight_scale and neither weight nor weight_packed")
        return self._tensors[f"{module}.weight"].shape

    def _read(self, name: str) -> Tensor:
        stored: Tensor | StoredTensor | None = self._tensors.get(name)
        if stored is None:
            raise CheckpointError(f"tensor {name!r} is missing")
        return read_tensor(stored, None)


def _by_group(scale: Tensor, inputs: int) -> Tensor:
    return scale.repeat_interleave(inputs // scale.shape[1], dim=1)


def _length(part: Part) -> int:
    return part.stop - part.start
