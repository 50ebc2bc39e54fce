"""Which version of the ops runs: chosen once, at first use, and logged with the reason.

`DSPARK_KERNELS` is `auto` (the compiled CPU version where it builds; the default), `cpu` (fail if it does not
build) or `torch` (the reference). The compiled version takes inference on CPU tensors in fp32 and bf16; the
rest, and whatever needs a gradient, goes to the reference.
"""

import functools
import logging
import os
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from dspark_kernels import torch_ops
from dspark_kernels.cpu_build import BuildError, load_library
from dspark_kernels.cpu_ops import TYPES, CpuOps

if TYPE_CHECKING:
    from dspark_kernels.attention import PagedBatch

logger = logging.getLogger(__name__)

ENV_VARIABLE = "DSPARK_KERNELS"
CHOICES = ("auto", "cpu", "torch")


class Ops(Protocol):
    """What a version offers. The modules norm, rope, activation and attention say what each op does."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def argmax(self, x: Tensor) -> Tensor: ...

    def noisy_argmax(self, probs: Tensor, keys: Tensor, ids: Tensor | None) -> Tensor: ...

    def markov_chain(
        self, base: Tensor, w1: Tensor, w2: Tensor, anchors: Tensor, vocab_map: Tensor | None
    ) -> tuple[Tensor, Tensor]: ...

    def qkv_rope(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        num_heads: int,
        num_kv_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def qkv_rope_store(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        num_heads: int,
        num_kv_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
    ) -> Tensor: ...

    def k_rope_store(
        self,
        kv: Tensor,
        cos: Tensor,
        sin: Tensor,
        num_kv_heads: int,
        k_norm: Tensor | None,
        eps: float,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
    ) -> None: ...

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: "PagedBatch",
        scale: float,
        window: int | None = None,
    ) -> Tensor: ...

    def block_attention(
        self,
        q: Tensor,
        k_block: Tensor,
        v_block: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: "PagedBatch",
        scale: float,
    ) -> Tensor: ...


def requested_version() -> str:
    """The value of `DSPARK_KERNELS`; ValueError if it is none of the choices."""
    value = os.environ.get(ENV_VARIABLE, "auto")
    if value not in CHOICES:
        raise ValueError(f"{ENV_VARIABLE}={value!r}: choose one of {', '.join(CHOICES)}")
    return value


def choose(requested: str) -> Ops:
    """The version for CPU tensors. BuildError only where `cpu` was asked for by name."""
    if requested == "torch":
        logger.info("kernels: torch reference (%s=torch)", ENV_VARIABLE)
        return torch_ops
    try:
        ops = CpuOps(load_library())
    except BuildError as error:
        if requested == "cpu":
            raise
        logger.warning("kernels: torch reference, slower, because the CPU version does not build: %s", error)
        return torch_ops
    logger.info("kernels: compiled CPU version (%s=%s)", ENV_VARIABLE, requested)
    return ops


@functools.cache
def cpu_version() -> Ops:
    """The version this process uses for CPU tensors."""
    return choose(requested_version())


def ops_for(x: Tensor, weight: Tensor | None = None) -> Ops:
    """The version for an op on `x` (and a weight that may want a gradient)."""
    if not x.is_cpu or x.dtype not in TYPES:
        return torch_ops
    if torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
        return torch_ops
    return cpu_version()
