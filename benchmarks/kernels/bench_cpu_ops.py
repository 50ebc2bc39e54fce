"""Times the ops of a SmolLM2-135M step: compiled CPU version against the torch reference.

    python benchmarks/kernels/bench_cpu_ops.py --json benchmarks/results/kernels_cpu.json

"steps": 30 layers of two norms, RoPE with cache stores, attention over 300-token contexts and the SwiGLU
gate. "linears": the four projections of 30 layers. Each layer has its own cache and weights, as in the model,
so both are read from memory. "ops_us": one call of each op at one row. The versions take turns, so that a
busy machine slows them alike; the figure is the fastest of the repeats. With --threads 1 it is CPU time,
which other processes disturb less, else wall time.
"""

import argparse
import functools
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from dspark_kernels import torch_ops
from dspark_kernels.attention import PagedBatch
from dspark_kernels.cpu_build import load_library
from dspark_kernels.cpu_ops import CpuOps
from dspark_kernels.dispatch import Ops
from dspark_kernels.linear import PackedLinear, _onednn, _plain
from torch import Tensor

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, INTERMEDIATE = 30, 576, 9, 3, 64, 1536
BLOCK_SIZE = 16
EPS = 1e-5
SHAPES = [(1, 1), (1, 4), (8, 1), (8, 4), (32, 1), (32, 4)]  # requests, rows of each
PREFILL = (1, 300)
LINEARS = [  # (out, in)
    ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
    (HIDDEN, HEADS * DIM),
    (2 * INTERMEDIATE, HIDDEN),
    (HIDDEN, INTERMEDIATE),
]
LINEAR_ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256]


@dataclass(frozen=True, slots=True)
class Inputs:
    """One step's tensors; the caches are [layers, S, KV, D]."""

    batch: PagedBatch
    hidden: Tensor  # [N, HIDDEN]
    weight: Tensor  # [HIDDEN]
    qkv: Tensor  # [N, (HEADS + 2·KV_HEADS)·DIM]
    gate_up: Tensor  # [N, 2·INTERMEDIATE]
    cos: Tensor  # [N, DIM / 2]
    slots: Tensor  # [N]
    k_caches: Tensor
    v_caches: Tensor


def make_inputs(requests: int, rows: int, context: int, dtype: torch.dtype) -> Inputs:
    blocks = -(-context // BLOCK_SIZE)
    tables = torch.randperm(requests * blocks, dtype=torch.int32).view(requests, blocks)
    starts = torch.arange(0, (requests + 1) * rows, rows, dtype=torch.int32)
    kv_len = torch.full((requests,), context, dtype=torch.int32)
    position = torch.arange(context - rows, context)
    slots = tables[:, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
    caches = torch.randn(2, LAYERS, requests * blocks * BLOCK_SIZE, KV_HEADS, DIM, dtype=dtype)
    total = requests * rows
    return Inputs(
        PagedBatch(starts, kv_len, tables, BLOCK_SIZE, rows, context),
        torch.randn(total, HIDDEN, dtype=dtype),
        torch.ones(HIDDEN, dtype=dtype),
        torch.randn(total, (HEADS + 2 * KV_HEADS) * DIM, dtype=dtype),
        torch.randn(total, 2 * INTERMEDIATE, dtype=dtype),
        torch.rand(total, DIM // 2),
        slots.reshape(-1),
        caches[0],
        caches[1],
    )


def attend(ops: Ops, x: Inputs, layer: int, q: Tensor) -> Tensor:
    return ops.paged_attention(q, x.k_caches[layer], x.v_caches[layer], x.batch, DIM**-0.5)


def rotate(ops: Ops, x: Inputs, layer: int) -> Tensor:
    shape = (HEADS, KV_HEADS, None, None, EPS)
    return ops.qkv_rope_store(x.qkv, x.cos, x.cos, *shape, x.k_caches[layer], x.v_caches[layer], x.slots)


def step(ops: Ops, x: Inputs) -> None:
    for layer in range(LAYERS):
        ops.add_rms_norm(x.hidden, x.hidden, x.weight, EPS)
        attend(ops, x, layer, rotate(ops, x, layer))
        ops.add_rms_norm(x.hidden, x.hidden, x.weight, EPS)
        ops.silu_mul(x.gate_up)


def fastest_ms(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(repeats):
        for name, function in functions.items():
            started = clock()
            function()
            best[name] = min(best[name], (clock() - started) * 1e3)
    return best


def time_steps(
    versions: dict[str, Ops], dtype: torch.dtype, repeats: int, context: int
) -> list[dict[str, float]]:
    results = []
    for requests, rows in [*SHAPES, PREFILL]:
        x = make_inputs(requests, rows, context, dtype)
        q = torch.randn(requests * rows, HEADS, DIM, dtype=dtype)
        steps: dict[str, Callable[[], object]] = {}
        attention: dict[str, Callable[[], object]] = {}
        for name, ops in versions.items():
            steps[name] = functools.partial(step, ops, x)
            attention[name] = functools.partial(attend_all, ops, x, q)
        step_ms, attention_ms = fastest_ms(steps, repeats), fastest_ms(attention, repeats)
        row: dict[str, float] = {"requests": requests, "rows": rows}
        for name in versions:
            row[f"{name}_step_ms"] = round(step_ms[name], 3)
            row[f"{name}_attention_ms"] = round(attention_ms[name], 3)
        results.append(row)
        print(row, flush=True)
    return results


def attend_all(ops: Ops, x: Inputs, q: Tensor) -> None:
    for layer in range(LAYERS):
        attend(ops, x, layer, q)


def time_linears(dtype: torch.dtype, repeats: int) -> list[dict[str, float]]:
    """Milliseconds of all linears of a step by rows: as the model runs them, by oneDNN, by F.linear."""
    makers = {"packed": PackedLinear, "onednn": _onednn, "torch": _plain}
    models: dict[str, list[list[Callable[[Tensor], Tensor]]]] = {name: [] for name in makers}
    for _ in range(LAYERS):
        weights = [torch.randn(size, dtype=dtype) for size in LINEARS]
        for name, make in makers.items():
            layer = [make(weight, None) for weight in weights]
            models[name].append([multiply for multiply in layer if multiply is not None])
    results = []
    for rows in LINEAR_ROWS:
        inputs = [torch.randn(rows, size[1], dtype=dtype) for size in LINEARS]
        functions: dict[str, Callable[[], object]] = {}
        for name, layers in models.items():
            functions[name] = functools.partial(multiply_all, layers, inputs)
        row: dict[str, float] = {"rows": rows}
        row.update({name: round(ms, 3) for name, ms in fastest_ms(functions, repeats).items()})
        results.append(row)
        print(row, flush=True)
    return results


def multiply_all(layers: list[list[Callable[[Tensor], Tensor]]], inputs: list[Tensor]) -> None:
    for layer in layers:
        for multiply, x in zip(layer, inputs, strict=False):
            multiply(x)


def time_calls(versions: dict[str, Ops], dtype: torch.dtype, repeats: int) -> dict[str, dict[str, float]]:
    """Microseconds of one call at one row and a 16-token context: mostly the cost of calling."""
    x = make_inputs(1, 1, 16, dtype)
    q = torch.randn(1, HEADS, DIM, dtype=dtype)
    results = {}
    for name, ops in versions.items():
        calls: dict[str, Callable[[], object]] = {
            "rms_norm": lambda ops=ops: ops.rms_norm(x.hidden, x.weight, EPS),
            "add_rms_norm": lambda ops=ops: ops.add_rms_norm(x.hidden, x.hidden, x.weight, EPS),
            "silu_mul": lambda ops=ops: ops.silu_mul(x.gate_up),
            "qkv_rope_store": lambda ops=ops: rotate(ops, x, 0),
            "paged_attention": lambda ops=ops: attend(ops, x, 0, q),
        }
        looped = {op: lambda call=call: [call() for _ in range(100)] for op, call in calls.items()}
        results[name] = {op: round(ms * 10, 2) for op, ms in fastest_ms(looped, repeats).items()}
        print(name, results[name])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    versions: dict[str, Ops] = {"cpu": CpuOps(load_library()), "torch": torch_ops}
    with torch.inference_mode():
        result = {
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "dtype": arguments.dtype,
            "threads": arguments.threads,
            "context": arguments.context,
            "linears_ms": time_linears(dtype, arguments.repeats),
            "steps": time_steps(versions, dtype, arguments.repeats, arguments.context),
            "ops_us": time_calls(versions, dtype, arguments.repeats),
        }
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
