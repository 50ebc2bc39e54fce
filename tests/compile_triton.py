"""Compiles every Triton kernel for an H200 (sm_90) on a machine without a GPU, as calls of the ops would.

python tests/compile_triton.py     prints each kernel that was compiled, its registers' spills excepted: those
are only known where it runs. Must be a process of its own, without TRITON_INTERPRET.
"""

from typing import Any

import torch
import triton
from dspark_kernels.attention import PagedBatch
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


class NoDriver:
    """Says what to compile for; nothing can be launched."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_instead_of_running() -> list[str]:
    """Makes every launch a compilation; the names of the kernels, as they are compiled."""
    triton.runtime.driver.set_active(NoDriver())
    run, names = JITFunction.run, []

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        assert kernel.asm["ptx"]
        names.append(self.__name__)

    JITFunction.run = compiled
    return names


def batch(rows: int, requests: int, max_kv: int) -> PagedBatch:
    start = torch.zeros(requests + 1, dtype=torch.int32)
    start[1:] = rows
    lens = torch.zeros(requests, dtype=torch.int32)
    tables = torch.zeros(requests, max_kv // 16, dtype=torch.int32)
    return PagedBatch(start, lens, tables, 16, 8, max_kv, torch.zeros(rows, dtype=torch.int32))


def compile_all() -> set[str]:
    names = compile_instead_of_running()
    compile_model_ops(torch.bfloat16, requests=4, rows=32)
    compile_model_ops(torch.bfloat16, requests=1, rows=1)  # a size of 1 is a constant to the compiler
    compile_model_ops(torch.float32, requests=4, rows=32)
    compile_choices(requests=4, rows=32, vocab=9000)
    compile_choices(requests=1, rows=1, vocab=500)
    return set(names)


def compile_model_ops(dtype: torch.dtype, *, requests: int, rows: int) -> None:
    """A decoder's and a drafter's."""
    from dspark_kernels import triton_ops as ops

    heads, kv_heads, dim, vocab, rank = 8, 2, 128, 9000, 256
    x, norm = torch.zeros(rows, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
    ops.rms_norm(x, norm, 1e-6)
    ops.add_rms_norm(x, x, norm, 1e-6)
    ops.silu_mul(x)
    q = torch.zeros(rows, heads, dim, dtype=dtype)
    k = torch.zeros(rows, kv_heads, dim, dtype=dtype)
    cache = torch.zeros(1024, kv_heads, dim, dtype=dtype)
    qkv = torch.zeros(rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
    cos = torch.zeros(rows, dim // 2)
    head_norm, slots = torch.zeros(dim, dtype=dtype), torch.zeros(rows, dtype=torch.int64)
    ops.qkv_rope(qkv, cos, cos, heads, kv_heads, None, None, 1e-6)
    ops.qkv_rope_store(qkv, cos, cos, heads, kv_heads, head_norm, head_norm, 1e-6, cache, cache, slots)
    kv = qkv[:, : 2 * kv_heads * dim].contiguous()
    ops.k_rope_store(kv, cos, cos, kv_heads, head_norm, 1e-6, cache, cache, slots)
    paged = batch(rows, requests, 4096)
    for splits in (1, 8) if dtype == torch.bfloat16 else (1,):
        ops.paged_attention(q, cache, cache, paged, 0.1, splits=splits)
        ops.block_attention(q, k, k, cache, cache, paged, 0.1, splits=splits)
    ops.paged_attention(q, cache, cache, paged, 0.1, 1024, 30.0)
    eight = cache.to(torch.float8_e4m3fn)
    ops.qkv_rope_store(qkv, cos, cos, heads, kv_heads, None, None, 1e-6, eight, eight, slots, 0.5, 2.0)
    for splits in (1, 8):
        ops.paged_attention(q, eight, eight, paged, 0.1, splits=splits)
    ops.argmax(torch.zeros(rows, vocab, dtype=dtype))
    w1, w2 = torch.zeros(vocab, rank, dtype=dtype), torch.zeros(rank, vocab, dtype=dtype)
    base, tokens = torch.zeros(requests, 2, vocab, dtype=dtype), torch.zeros(requests, dtype=torch.int64)
    ops.markov_chain(base, w1, w2, tokens, torch.arange(vocab))
    ops.markov_logits(base[:, 0], w1, w2, tokens)
    for kind in (torch.int8, torch.float8_e4m3fn):
        ops.scaled_linear(x, torch.zeros(256, 4096, dtype=kind), torch.zeros(256), None)


def compile_choices(*, requests: int, rows: int, vocab: int) -> None:
    """What picks tokens and lengths."""
    from dspark_kernels import triton_ops as ops

    probs, ids, column = torch.zeros(rows, vocab), torch.zeros(rows, dtype=torch.int64), torch.ones(rows, 1)
    ops.filtered_probs(probs, column, column.long(), column, column)
    ops.noisy_argmax(probs, ids, None)
    ops.noisy_argmax(probs, ids, torch.arange(vocab))
    starts = torch.linspace(0, rows, requests + 1).int()
    ops.leading_matches(ids, ids, starts, 7)
    uniforms = torch.zeros(rows, dtype=torch.float64)
    hot = torch.zeros(requests, dtype=torch.bool)
    vocab_map, part = torch.arange(100), torch.zeros(rows, 100)
    for extra in (
        (None, None, None, None),
        (probs, None, None, None),
        (probs, hot, None, None),
        (part, hot, vocab_map, ids),
    ):
        ops.accept(probs, ids, starts, 7, uniforms, ids[:requests], *extra)
    lens = torch.zeros(requests, dtype=torch.int32)
    ops.survival_lengths(torch.zeros(requests, 7), torch.ones(1, dtype=torch.int32), lens)


if __name__ == "__main__":
    print(*sorted(compile_all()), sep="\n")
