"""Which version of the ops runs: chosen once for each kind of device, at first use, logged with the reason.

`DSPARK_KERNELS` is `auto` (Triton for CUDA tensors, the compiled version for CPU tensors where it builds; the
default), `triton` (fail without it; CPU tensors go to its interpreter, which is for tests and wants
TRITON_INTERPRET=1), `cpu` (fail if the compiled version does not build) or `torch` (the reference). The
faster versions take inference in fp32 and bf16; the rest, and whatever needs a gradient, goes to the
reference.
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
CHOICES = ("auto", "triton", "torch", "cpu")


class KernelsError(RuntimeError):
    """The version that was asked for by name cannot run here; the message says what to do."""


class Ops(Protocol):
    """What a version offers. The modules norm, rope, activation, attention, choose, noise and sampling say
    what each op does."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def filtered_probs(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor | None,
        top_p: Tensor | None,
        min_p: Tensor | None,
    ) -> Tensor: ...

    def inverse_cdf(self, weights: Tensor, uniforms: Tensor) -> Tensor: ...

    def leading_matches(
        self, chosen: Tensor, drafted: Tensor, row_start: Tensor, most: int
    ) -> tuple[Tensor, Tensor]: ...

    def accept(
        self,
        probs: Tensor,
        drafted: Tensor,
        row_start: Tensor,
        most: int,
        uniforms: Tensor,
        keys: Tensor,
        draft_probs: Tensor | None,
        one_hot: Tensor | None,
        vocab_map: Tensor | None,
        draft_ids: Tensor | None,
    ) -> tuple[Tensor, Tensor]: ...

    def survival_lengths(self, confidences: Tensor, budget: Tensor, max_lens: Tensor) -> Tensor: ...

    def scaled_linear(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor: ...

    def markov_logits(self, base: Tensor, w1: Tensor, w2: Tensor, previous: Tensor) -> Tensor: ...

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
        k_scale: float = 1.0,
        v_scale: float = 1.0,
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
        soft_cap: float | None = None,
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
    """The version for CPU tensors. BuildError only where `cpu` was asked for by name, KernelsError only for
    `triton`."""
    if requested == "torch":
        logger.info("kernels: torch reference (%s=torch)", ENV_VARIABLE)
        return torch_ops
    if requested == "triton":
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise KernelsError(
                f"{ENV_VARIABLE}=triton runs CPU tensors through Triton's interpreter, which is slow and for "
                "tests only; set TRITON_INTERPRET=1 before the start if that is meant, or "
                f"{ENV_VARIABLE}=auto"
            )
        logger.warning("kernels: Triton's interpreter, slow, for tests (%s=triton)", ENV_VARIABLE)
        return _triton_ops()
    try:
        ops = CpuOps(load_library())
    except BuildError as error:
        if requested == "cpu":
            raise
        logger.warning("kernels: torch reference, slower, because the CPU version does not build: %s", error)
        return torch_ops
    logger.info("kernels: compiled CPU version (%s=%s)", ENV_VARIABLE, requested)
    return ops


def choose_for_cuda(requested: str) -> Ops:
    """The version for CUDA tensors. KernelsError only where `triton` was asked for by name."""
    if requested in ("torch", "cpu"):
        logger.info("kernels on CUDA: torch reference (%s=%s)", ENV_VARIABLE, requested)
        return torch_ops
    try:
        ops = _triton_ops()
    except KernelsError as error:
        if requested == "triton":
            raise
        logger.warning("kernels on CUDA: torch reference, slower, because %s", error)
        return torch_ops
    logger.info("kernels on CUDA: Triton (%s=%s)", ENV_VARIABLE, requested)
    return ops


def _triton_ops() -> Ops:
    """Imported when it is wanted: Triton need not be installed, and reads TRITON_INTERPRET then."""
    try:
        from dspark_kernels import triton_ops
    except ImportError as error:
        raise KernelsError(f"Triton cannot be imported ({error}): pip install 'dspark-ray[gpu]'") from error
    return triton_ops


@functools.cache
def cpu_version() -> Ops:
    """The version this process uses for CPU tensors."""
    return choose(requested_version())


@functools.cache
def cuda_version() -> Ops:
    """The version this process uses for CUDA tensors."""
    return choose_for_cuda(requested_version())


def ops_for(x: Tensor, weight: Tensor | None = None) -> Ops:
    """The version for an op on `x` (and a weight that may want a gradient)."""
    if x.dtype not in TYPES and x.dtype != torch.int64:
        return torch_ops
    if torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
        return torch_ops
    if x.is_cpu:
        return cpu_version()
    return cuda_version() if x.is_cuda else torch_ops
