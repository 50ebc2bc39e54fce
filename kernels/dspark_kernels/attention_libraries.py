"""Other people's attention kernels, as `paged_attention` is called: FlashAttention 2 and 3, FlashInfer.

library = load_library("flash_attn_3")       # LibraryError where it cannot be used
library.refusal(shape)                       # why not for this model; None: it can
library(q, k_cache, v_cache, batch, scale, window, soft_cap)

They read the KV cache where it lies: a cache of [S, KV, D] is [S / block_size, block_size, KV, D] to them, a
view. What one cannot express it refuses; nobody copies or converts for it. Whether one is used is decided
elsewhere, by the clock.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from dspark_kernels.attention import PagedBatch

HALVES = (torch.bfloat16, torch.float16)


class LibraryError(RuntimeError):
    """A library does not import, or has another interface; the message says which."""


class LibraryMissingError(LibraryError):
    """It is not installed, which is nothing to worry about."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a model asks of attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of queries and outputs
    kv_dtype: torch.dtype
    block_size: int
    windows: tuple[int | None, ...]  # one a layer
    capability: tuple[int, int]  # of the GPU


class PagedAttention(Protocol):
    """`paged_attention`, or what stands in for it."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: PagedBatch,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor: ...


class AttentionLibrary(PagedAttention, Protocol):
    """One of them."""

    name: str
    distribution: str  # the package that is installed
    capturable: bool  # takes lengths from the device, so a recorded call replays with others

    def refusal(self, shape: AttentionShape) -> str | None:
        """Why it cannot be used for this model on this GPU; None where it can. For any thread."""


class FlashAttention2:
    """`flash_attn.flash_attn_varlen_func` with a block table."""

    name = "flash_attn"
    distribution = "flash-attn"
    capturable = True

    def __init__(self) -> None:
        module = _module("flash_attn")
        wanted = (
            "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k softmax_scale causal window_size softcap"
        )
        self._attend = _function(module, "flash_attn_varlen_func", f"{wanted} block_table")

    def refusal(self, shape: AttentionShape) -> str | None:
        if shape.block_size % 256 != 0:
            return f"its pages are multiples of 256 keys, engine.kv_block_size is {shape.block_size}"
        return _flash_refusal(shape)

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: PagedBatch,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        # Made in every call: a sum that one recording left behind would not be made again in a replay.
        key_start = torch.nn.functional.pad(batch.kv_len.cumsum(0, dtype=torch.int32), (1, 0))
        out: Tensor = self._attend(
            q.contiguous(),
            paged(k_cache, batch.block_size),
            paged(v_cache, batch.block_size),
            cu_seqlens_q=batch.query_start,
            cu_seqlens_k=key_start,
            max_seqlen_q=batch.max_query,
            max_seqlen_k=batch.max_kv,
            softmax_scale=scale,
            causal=True,
            window_size=_window_size(window),
            softcap=soft_cap or 0.0,
            block_table=batch.block_tables,
        )
        return out


class FlashAttention3:
    """`flash_attn_interface.flash_attn_with_kvcache` with a page table and ragged queries."""

    name = "flash_attn_3"
    distribution = "flash-attn-3"
    capturable = True

    def __init__(self) -> None:
        module = _module("flash_attn_interface", "flash_attn_3.flash_attn_interface")
        wanted = "cache_seqlens page_table cu_seqlens_q max_seqlen_q softmax_scale causal window_size softcap"
        self._attend = _function(module, "flash_attn_with_kvcache", wanted)

    def refusal(self, shape: AttentionShape) -> str | None:
        if shape.capability[0] != 9:
            return f"it is for GPUs of compute capability 9, this one has {_dotted(shape.capability)}"
        return _flash_refusal(shape)

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: PagedBatch,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        out: Tensor = self._attend(
            q.contiguous(),
            paged(k_cache, batch.block_size),
            paged(v_cache, batch.block_size),
            cache_seqlens=batch.kv_len,
            page_table=batch.block_tables,
            cu_seqlens_q=batch.query_start,
            max_seqlen_q=batch.max_query,
            softmax_scale=scale,
            causal=True,
            window_size=_window_size(window),
            softcap=soft_cap or 0.0,
        )
        return out


class FlashInfer:
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`, planned on the host, once a batch.

    A plan depends on the lengths, so a batch whose lengths only the device knows cannot be run, and no call
    can be captured. One instance for a stream: its wrappers share a workspace.
    """

    name = "flashinfer"
    distribution = "flashinfer-python"
    capturable = False
    WORKSPACE_BYTES = 128 << 20  # what its documentation recommends

    def __init__(self) -> None:
        module = _module("flashinfer")
        self._wrapper_type: Any = getattr(module, "BatchPrefillWithPagedKVCacheWrapper", None)
        if self._wrapper_type is None:
            raise LibraryError("flashinfer has no BatchPrefillWithPagedKVCacheWrapper")
        plan = "causal sm_scale window_left logits_soft_cap q_data_type kv_data_type"
        _function(self._wrapper_type, "plan", plan)
        _function(self._wrapper_type, "run", "k_scale")
        self._workspace: Tensor | None = None
        self._wrappers: dict[tuple[object, ...], Any] = {}
        self._planned: dict[tuple[object, ...], PagedBatch] = {}  # what each wrapper's plan is for

    def refusal(self, shape: AttentionShape) -> str | None:
        if shape.capability < (8, 0):
            return f"it needs compute capability 8.0, this GPU has {_dotted(shape.capability)}"
        if shape.dtype not in HALVES:
            return f"it computes in 16 bits, model.dtype is {_type_name(shape.dtype)}"
        if shape.kv_dtype not in (shape.dtype, torch.float8_e4m3fn):
            return f"it reads no keys in {_type_name(shape.kv_dtype)}"
        if shape.head_dim not in (64, 128, 256):
            return f"its heads have 64, 128 or 256 dimensions, the model's {shape.head_dim}"
        return None

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: PagedBatch,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """AssertionError for a batch whose lengths are not on the host."""
        keys, values = (paged(cache, batch.block_size) for cache in (k_cache, v_cache))
        # Layers differ in their window and, where keys are scaled, in `scale`: a plan holds for all of one
        # window, with the scale that the size of heads implies.
        usual = float(q.shape[2] ** -0.5)
        kind = (window, soft_cap, q.shape[1:], keys.shape[1:], q.dtype, keys.dtype)
        wrapper = self._wrappers.get(kind)
        if wrapper is None:
            if self._workspace is None:
                self._workspace = torch.empty(self.WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
            wrapper = self._wrappers[kind] = self._wrapper_type(self._workspace, "NHD")
        if self._planned.get(kind) is not batch:
            self._plan(wrapper, q, keys, batch, usual, window, soft_cap)
            self._planned[kind] = batch
        out: Tensor = wrapper.run(q.contiguous(), (keys, values), k_scale=scale / usual)
        return out

    def _plan(
        self,
        wrapper: Any,  # of a module that need not be there
        q: Tensor,
        keys: Tensor,
        batch: PagedBatch,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> None:
        host = batch if batch.query_start.is_cpu else batch.on_host
        assert host is not None, "a plan needs lengths on the host"
        size = host.block_size
        num_pages = (host.kv_len + size - 1) // size
        used = torch.arange(host.block_tables.shape[1]) < num_pages[:, None]
        last = torch.where(num_pages > 0, host.kv_len - (num_pages - 1) * size, 0)
        wrapper.plan(
            host.query_start,
            torch.nn.functional.pad(num_pages.cumsum(0, dtype=torch.int32), (1, 0)),
            host.block_tables[used],
            last.int(),
            q.shape[1],
            keys.shape[2],
            q.shape[2],
            size,
            causal=True,
            sm_scale=scale,
            window_left=_window_size(window)[0],
            logits_soft_cap=soft_cap or 0.0,
            q_data_type=q.dtype,
            kv_data_type=keys.dtype,
        )


LIBRARIES: dict[str, type[FlashAttention2] | type[FlashAttention3] | type[FlashInfer]] = {
    one.name: one for one in (FlashAttention2, FlashAttention3, FlashInfer)
}


def load_library(name: str) -> AttentionLibrary:
    """Imports it. `LibraryError` where it cannot be used, whatever its import raised."""
    return LIBRARIES[name]()


def installed_versions() -> dict[str, str]:
    """Of the libraries' packages, by the library's name; nothing is imported."""
    found = {}
    for name, library in LIBRARIES.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(library.distribution)
    return found


def paged(cache: Tensor, block_size: int) -> Tensor:
    """A cache [S, KV, D] in pages [S / block_size, block_size, KV, D]: the same memory."""
    return cache.unflatten(0, (-1, block_size))


def _window_size(window: int | None) -> tuple[int, int]:
    """Keys to the left of a row's own and to its right; ours counts its own, −1 is no limit."""
    return (-1, -1) if window is None else (window - 1, 0)


def _flash_refusal(shape: AttentionShape) -> str | None:
    """What both FlashAttentions refuse."""
    if shape.capability < (8, 0):
        return f"it needs compute capability 8.0, this GPU has {_dotted(shape.capability)}"
    if shape.dtype not in HALVES:
        return f"it computes in 16 bits, model.dtype is {_type_name(shape.dtype)}"
    if shape.kv_dtype != shape.dtype:
        return f"its keys have the queries' type, engine.kv_dtype is {_type_name(shape.kv_dtype)}"
    if shape.head_dim % 8 != 0 or shape.head_dim > 256:
        return f"its heads have a multiple of 8 dimensions up to 256, the model's {shape.head_dim}"
    return None


def _module(*names: str) -> ModuleType:
    """The first of them that is installed, imported."""
    for name in names:
        top = name.partition(".")[0]
        if top not in sys.modules and importlib.util.find_spec(top) is None:
            continue
        try:
            return importlib.import_module(name)
        except Exception as error:  # a library built for another torch fails as it likes
            raise LibraryError(f"import {name}: {type(error).__name__}: {error}") from error
    raise LibraryMissingError(f"{names[0]} is not installed")


def _function(owner: Any, name: str, parameters: str) -> Callable[..., Any]:
    """An attribute that takes those parameters; `LibraryError` for another version's interface."""
    function = getattr(owner, name, None)
    label = f"{owner.__name__}.{name}"
    if not callable(function):
        raise LibraryError(f"{label} is missing: another version is installed")
    known = inspect.signature(function).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())
    missing = [one for one in parameters.split() if one not in known]
    if missing and not takes_any:
        raise LibraryError(f"{label} does not take {', '.join(missing)}: another version is installed")
    return function


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
