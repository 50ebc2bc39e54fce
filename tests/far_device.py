"""A device that is not the CPU, without one: tensors whose values lie on the CPU and who deny it.

with far_device() as device:
    x = torch.zeros(3, device=device)  # x.device is not the CPU; x.numpy() fails
    x + torch.zeros(3)  # AssertionError: a tensor of the CPU in an op of the device

What a step on a GPU may not do fails here, too: mixing tensors of both (but for numbers and indices, as
CUDA), reading values through NumPy. `.cpu()`, `.tolist()`, `.item()` and `.to(device)` work, and are noted:

with far_device() as device, host_waits() as waits:
    x.tolist()  # waits == ["tolist"]

A wait is what torch.cuda.set_sync_debug_mode("error") refuses, and what brings values to the host: copies to
it and blocking ones from it, shapes that depend on values. The ops of `dspark_kernels` are kernels of the
device: their reference runs on what the tensors hold, and however it does, nothing waits for it.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from dspark_kernels import dispatch
from dspark_kernels.attention import PagedBatch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

CPU = torch.device("cpu")
FAR = torch.device("meta")  # stands for the device's name; meta kernels never run
_INDEXING = ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_")
_SHAPED_BY_VALUES = ("aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal")
_NUMBERS = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero")
_watching: list[list[str]] = []


@contextmanager
def host_waits() -> Iterator[list[str]]:
    """Notes every op that makes the host wait for the device, by name."""
    waits: list[str] = []
    _watching.append(waits)
    try:
        yield waits
    finally:
        assert _watching.pop() is waits  # they may be nested


def _note_wait(name: str) -> None:
    for waits in _watching:
        waits.append(name)


class FarTensor(Tensor):
    """Holds a CPU tensor and says that it is elsewhere."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "FarTensor":
        made: FarTensor = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=FAR,
        )
        made.held = held
        return made

    def tolist(self) -> Any:
        _note_wait("tolist")
        return self.held.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("the tensor is on a device: .cpu() comes before .numpy()")

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    name = func._schema.name
    near: list[Tensor] = []
    any_far = False

    def look(x: object) -> None:
        nonlocal any_far
        if isinstance(x, FarTensor):
            any_far = True
        elif isinstance(x, Tensor):
            assert x.is_cpu, "a tensor that was made where nothing looked"
            near.append(x)

    tree_map(look, (args, kwargs))
    devices = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.device)]
    target = devices[0] if devices else None
    args = [CPU if isinstance(x, torch.device) else x for x in args]
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
    if name in ("aten::to", "aten::_to_copy"):
        to_far = any_far if target is None else target.type != "cpu"
        if to_far != any_far:  # another memory: always a copy
            if not to_far or not _is_non_blocking(func, args, kwargs):
                _note_wait(name)
            copied = _crossed(func, args, kwargs)
            return FarTensor(copied) if to_far else copied
    elif name in _NUMBERS:
        to_far = False
        _note_wait(name)
    elif name == "aten::copy_":
        to_far = any_far
        if any_far and near and (args[0] is near[0] or not _is_non_blocking(func, args, kwargs)):
            _note_wait(name)
    else:
        to_far = any_far or (target is not None and target.type != "cpu")
        strangers = [t for t in near if t.dim() > 0] if any_far else []
        if name in _INDEXING:
            strangers = [t for t in strangers if t.dtype not in (torch.int64, torch.bool)]
            indices = [t for t in args[1] if t is not None]
            if any_far and any(t.dtype == torch.bool or not isinstance(t, FarTensor) for t in indices):
                _note_wait(name)
        if any_far and _is_shaped_by_values(func, args, kwargs):
            _note_wait(name)
        shapes = [tuple(t.shape) for t in strangers]
        assert not strangers, f"{name}: a tensor of the CPU {shapes} in an op of the device"
    if "device" in {a.name for a in func._schema.arguments}:
        kwargs = {**kwargs, "device": CPU}
    out = func(*tree_map(_held, args), **tree_map(_held, kwargs))
    if func._schema.is_mutable and args and isinstance(args[0], FarTensor) and out is not None:
        return args[0]
    return tree_map(lambda x: FarTensor(x) if isinstance(x, Tensor) and to_far else x, out)


def _given(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name."""
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _is_non_blocking(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return bool(_given(func, args, kwargs).get("non_blocking", False))


def _is_shaped_by_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if func._schema.name == "aten::repeat_interleave":
        given = _given(func, args, kwargs)
        return isinstance(given["repeats"], Tensor) and given.get("output_size") is None
    return func._schema.name in _SHAPED_BY_VALUES


def _crossed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """What `.to` makes, with a memory of its own."""
    copied: Tensor = func(*tree_map(_held, args), **tree_map(_held, kwargs))
    return copied.clone()


def _held(x: object) -> object:
    return x.held if isinstance(x, FarTensor) else x


class _FarMode(TorchDispatchMode):
    """Makes new tensors on the device, when they are asked for there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(x, torch.device) and x == FAR for x in (*args, *kwargs.values())):
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


def _indices(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(map(_indices, index))
    return torch.tensor(index, dtype=torch.int64) if isinstance(index, list) else index


class _FromNumbers(TorchFunctionMode):
    """`torch.tensor(numbers, device=…)` and indices in lists, which are made below the dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and kwargs.get("device") == FAR:
            _note_wait("tensor")
            return FarTensor(func(*args, **kwargs | {"device": CPU}))
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[0], FarTensor):
            args = (args[0], _indices(args[1]), *args[2:])
        return func(*args, **kwargs)


class _Kernels:
    """Ops of another version for tensors of the device."""

    def __init__(self, ops: ModuleType) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = getattr(self._ops, name)

        def launched(*args: Any) -> Any:
            if not any(isinstance(x, FarTensor) for x in args):
                return op(*args)
            near = [x for x in args if isinstance(x, Tensor) and not isinstance(x, FarTensor)]
            assert not near, f"{name}: a tensor of the CPU in a kernel of the device"
            out = op(*map(_taken, args))
            return tree_map(lambda x: FarTensor(x) if isinstance(x, Tensor) else x, out)

        return launched


def _taken(x: object) -> object:
    """What a kernel finds behind its argument."""
    if isinstance(x, PagedBatch):
        fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
        assert not any(isinstance(v, Tensor) and not isinstance(v, FarTensor) for v in fields.values())
        return PagedBatch(**{name: _held(value) for name, value in fields.items()})
    return _held(x)


@contextmanager
def far_device() -> Iterator[torch.device]:
    plain = dispatch.torch_ops
    dispatch.torch_ops = _Kernels(plain)  # type: ignore[assignment]
    try:
        # All in inference mode: a view of a subclass made outside of it fails inside.
        with torch.inference_mode(), _FromNumbers(), _FarMode():
            yield FAR
    finally:
        dispatch.torch_ops = plain
