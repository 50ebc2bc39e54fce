"""What LoRA adapters add to a step of the target: the forward pass with and without them.

    python benchmarks/lora/step_cost.py --threads 1 --json benchmarks/results/lora-step-cost.json

The shipped default target in bf16, random adapters of all seven matrices, the rows' adapters in turn. The
variants take turns; the figure is the median of the rounds.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
from dspark_kernels.attention import PagedBatch

from dspark_ray.core.types import AdapterRef
from dspark_ray.models.fetch import resolve_model
from dspark_ray.models.targets.decoder import Decoder, load_target
from dspark_ray.models.targets.lora import Adapter, AdapterPack, AdapterRows, LowRank

ROWS = (1, 8, 32, 256)
NUM_ADAPTERS = (1, 4, 8)
BLOCK_SIZE, CONTEXT = 16, 128


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    target = load_target(resolve_model("default"), torch.bfloat16, 2048)
    packs = {
        count: AdapterPack([_adapter(target, options.rank) for _ in range(count)]) for count in NUM_ADAPTERS
    }
    results = []
    for rows in ROWS:
        variants: dict[int, AdapterRows | None] = {0: None}
        for count, pack in packs.items():
            variants[count] = pack.rows(torch.arange(rows) % count, target.dtype)
        times = _measure(target, rows, variants, options.rounds)
        results.append(
            {"rows": rows, "ms": times, "ratio": {n: round(t / times[0], 3) for n, t in times.items()}}
        )
        print(rows, results[-1]["ms"], results[-1]["ratio"])
    if options.json is not None:
        machine = {"threads": options.threads, "cores": os.cpu_count(), "rank": options.rank}
        options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _adapter(target: Decoder, rank: int) -> Adapter:
    c = target.config
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes = {  # outputs, inputs, parts
        "qkv": (heads + 2 * kv, c.hidden_size, 3),
        "o": (c.hidden_size, heads, 1),
        "gate_up": (2 * c.intermediate_size, c.hidden_size, 2),
        "down": (c.hidden_size, c.intermediate_size, 1),
    }
    layer = {
        name: LowRank(
            torch.randn(parts * rank, inputs, dtype=target.dtype) * 0.01,
            torch.randn(outputs, parts * rank, dtype=target.dtype) * 0.01,
        )
        for name, (outputs, inputs, parts) in shapes.items()
    }
    return Adapter(AdapterRef("random", "", ""), rank, (layer,) * c.num_layers)


@torch.inference_mode()
def _measure(
    target: Decoder, rows: int, variants: dict[int, AdapterRows | None], rounds: int
) -> dict[int, float]:
    """Adapters → median ms of a forward pass: one row each of so many requests of `CONTEXT` tokens."""
    blocks = CONTEXT // BLOCK_SIZE
    kv = target.new_kv(rows * CONTEXT)
    tables = torch.arange(rows * blocks, dtype=torch.int32).view(rows, blocks)
    slots = torch.arange(rows) * CONTEXT + CONTEXT - 1
    batch = PagedBatch(
        query_start=torch.arange(rows + 1, dtype=torch.int32),
        kv_len=torch.full((rows,), CONTEXT, dtype=torch.int32),
        block_tables=tables,
        block_size=BLOCK_SIZE,
        max_query=1,
        max_kv=CONTEXT,
    )
    ids, positions = torch.arange(rows), torch.full((rows,), CONTEXT - 1)
    times: dict[int, list[float]] = {count: [] for count in variants}
    for number in range(rounds + 1):
        for count, adapters in variants.items():
            started = time.perf_counter()
            target.forward(ids, positions, kv, slots, batch, (), adapters)
            if number:  # the first round warms up
                times[count].append((time.perf_counter() - started) * 1e3)
    return {count: round(statistics.median(found), 2) for count, found in times.items()}


if __name__ == "__main__":
    main()
