"""Safetensors checkpoints, read strictly: a model takes its tensors by name, and nothing may be left over.

source = WeightSource(load_safetensors(model_dir), dtype=torch.bfloat16)
weight = source.take("model.norm.weight", (hidden_size,))
source.finish(ignorable=["lm_head.weight"])  # a tied head may be stored, but is not read
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from dspark_ray.core.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Buffers that old exporters stored; every model computes them from its config.
_IGNORABLE_SUFFIXES = ("rotary_emb.inv_freq",)
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_NAMES_SHOWN = 8
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a tensor along one of its dimensions."""

    dim: int
    start: int
    stop: int


class StoredTensor:
    """A tensor of a safetensors file that has not been read."""

    def __init__(self, path: Path, file: Any, name: str) -> None:
        self._path, self._file, self._name = path, file, name
        self.shape: tuple[int, ...] = tuple(file.get_slice(name).get_shape())

    def read(self, part: Part | None = None) -> Tensor:
        """All of it, mapped from the file; of a part, its own bytes are read and no others."""
        try:
            if part is None:
                return self._file.get_tensor(self._name)
            index = (slice(None),) * part.dim + (slice(part.start, part.stop),)
            return self._file.get_slice(self._name)[index]
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {self._name} of {self._path}: {error}") from error


def open_safetensors(model_dir: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint directory by name, each read when it is asked for. Files and errors as in
    `load_safetensors`."""
    tensors: dict[str, StoredTensor] = {}
    for path in safetensors_files(model_dir):
        shard = open_tensors(path)
        if twice := sorted(tensors.keys() & shard.keys()):
            raise CheckpointError(f"{path}: tensors stored in two shards: {_shorten(twice)}")
        tensors |= shard
    _check_complete(model_dir, tensors.keys())
    return tensors


def load_safetensors(model_dir: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint directory by name, on the CPU, mapped from the file and not copied.

    Reads `model.safetensors`, else the shards named in `model.safetensors.index.json`, else the only
    `*.safetensors` file. Pickled weights are refused, since unpickling runs code. Raises
    `CheckpointError` for anything unreadable, incomplete or ambiguous.
    """
    tensors: dict[str, Tensor] = {}
    for path in safetensors_files(model_dir):
        shard = load_tensors(path)
        if twice := sorted(tensors.keys() & shard.keys()):
            raise CheckpointError(f"{path}: tensors stored in two shards: {_shorten(twice)}")
        tensors |= shard
    _check_complete(model_dir, tensors.keys())
    return tensors


def safetensors_files(model_dir: Path) -> list[Path]:
    """The files `load_safetensors` reads; `CheckpointError` when there are none or it is unclear which."""
    if not model_dir.is_dir():
        raise CheckpointError(f"{model_dir} is not a directory")
    if (single := model_dir / SINGLE_FILE).is_file():
        return [single]
    if (index := model_dir / INDEX_FILE).is_file():
        return [_shard_path(model_dir, name) for name in sorted(set(_read_weight_map(index).values()))]
    found = sorted(model_dir.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise CheckpointError(f"{model_dir} holds {len(found)} safetensors files but no {INDEX_FILE}")
    if any(next(model_dir.glob(pattern), None) for pattern in _PICKLE_PATTERNS):
        raise CheckpointError(
            f"{model_dir} holds pickled weights only, which are not loaded since unpickling runs code; "
            f"convert them to {SINGLE_FILE}"
        )
    raise CheckpointError(f"{model_dir} holds no safetensors file")


class WeightSource:
    """The tensors of one checkpoint, handed out by name, each once.

    `dtype` is what floating-point tensors become (None: as stored); integer tensors keep theirs. A
    tensor that needs no cast still shares the memory of the file, if it stays on the CPU.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor] | Mapping[str, StoredTensor],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device = CPU,
    ) -> None:
        self._tensors = tensors
        self._dtype, self._device = dtype, device
        self._taken: set[str] = set()

    @property
    def device(self) -> torch.device:
        """Where the tensors go."""
        return self._device

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, shape: Sequence[int], part: Part | None = None) -> Tensor:
        """The tensor `name` of exactly `shape`, or a part of it; `CheckpointError` when it is missing or has
        another shape."""
        tensor = self.take_optional(name, shape, part)
        if tensor is None:
            left = sorted(self._tensors.keys() - self._taken)
            raise CheckpointError(f"tensor {name!r} {list(shape)} is missing; unused: {_shorten(left)}")
        return tensor

    def take_optional(self, name: str, shape: Sequence[int], part: Part | None = None) -> Tensor | None:
        """As `take`, with None for a tensor the checkpoint does not hold (a bias, an untied head)."""
        assert name not in self._taken, f"tensor {name!r} is taken twice"
        if name not in self._tensors:
            return None
        self._taken.add(name)
        stored = self._tensors[name]
        if tuple(stored.shape) != tuple(shape):
            raise CheckpointError(
                f"tensor {name!r} has shape {list(stored.shape)}, the config asks for {list(shape)}"
            )
        return self._cast(read_tensor(stored, part))

    def take_number(self, name: str, default: float) -> float:
        """The only number of a tensor, or `default` where the checkpoint does not hold it."""
        if name not in self._tensors:
            return default
        self._taken.add(name)
        stored = read_tensor(self._tensors[name], None)
        if stored.numel() != 1:
            raise CheckpointError(f"tensor {name!r} has shape {list(stored.shape)}, and one number is read")
        return float(stored)

    def whole(self, name: str) -> Tensor:
        """All of a tensor of which parts were taken, or that was taken already."""
        assert name in self._taken, f"tensor {name!r} was not taken"
        return self._cast(read_tensor(self._tensors[name], None))

    def _cast(self, tensor: Tensor) -> Tensor:
        if self._dtype is None or not tensor.is_floating_point():
            return tensor.to(self._device)
        return tensor.to(self._device, self._dtype)

    def finish(self, *, ignorable: Sequence[str] = ()) -> None:
        """`CheckpointError` if a tensor was never taken, unless its name is in `ignorable`.

        Call it when the model is complete: a leftover tensor means that the config describes another
        model than the weights (an ignored bias or q/k norm changes every logit and fails nothing else).
        """
        leftover = [
            name
            for name in sorted(self._tensors.keys() - self._taken)
            if name not in ignorable and not name.endswith(_IGNORABLE_SUFFIXES)
        ]
        if leftover:
            raise CheckpointError(f"{len(leftover)} tensors have no place in the model: {_shorten(leftover)}")


def read_tensor(stored: Tensor | StoredTensor, part: Part | None) -> Tensor:
    """All of a tensor, or a part of it."""
    if isinstance(stored, StoredTensor):
        return stored.read(part)
    return (
        stored if part is None else stored.narrow(part.dim, part.start, part.stop - part.start).contiguous()
    )


def load_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of one safetensors file; `CheckpointError` if it cannot be read."""
    try:
        return load_file(path, device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def open_tensors(path: Path) -> dict[str, StoredTensor]:
    """All tensors of one safetensors file by name, each read when it is asked for; `CheckpointError` if it
    cannot be opened."""
    try:
        file = safe_open(path, framework="pt", device="cpu")
        return {name: StoredTensor(path, file, name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _check_complete(model_dir: Path, names: Collection[str]) -> None:
    """Every tensor of the index is there."""
    index = model_dir / INDEX_FILE
    expected = _read_weight_map(index) if index.is_file() and not (model_dir / SINGLE_FILE).is_file() else {}
    if absent := sorted(set(expected) - set(names)):
        raise CheckpointError(f"{index} lists tensors that no shard holds: {_shorten(absent)}")


def _read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name → shard file name."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(shard) for name, shard in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error


def _shard_path(model_dir: Path, name: str) -> Path:
    # A hub repository is a stranger's: its index must not name files elsewhere on the disk.
    if Path(name).name != name:
        raise CheckpointError(f"{model_dir / INDEX_FILE} names a shard outside its directory: {name!r}")
    return model_dir / name


def _shorten(names: Sequence[str]) -> str:
    rest = len(names) - _NAMES_SHOWN
    shown = ", ".join(names[:_NAMES_SHOWN]) or "none"
    return f"{shown} and {rest} more" if rest > 0 else shown
