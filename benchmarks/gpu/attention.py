"""Section `attention`: the Triton kernel against what is installed, for verification's shapes.

SDPA and FlashAttention get their keys gathered and side by side, which costs them nothing here; FlashInfer
reads the same pages. "best_ratio" is our time over that of the fastest other one.
"""

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from dspark_kernels.attention import PagedBatch, paged_attention
from timing import Results, arguments, stream_ms
from torch import Tensor

PAGE = 16
HEADS, KV_HEADS, DIM = 32, 8, 128


def main() -> int:
    args = arguments()
    device = torch.device(args.device)
    results = Results(args.json)
    shapes = (
        [(2, 3, 40)]
        if args.tiny
        else [(1, 8, 1024), (1, 8, 16384), (32, 8, 1024), (128, 8, 1024), (256, 4, 2048)]
    )
    with torch.inference_mode():
        for requests, rows, context in shapes:
            name = f"{requests} requests x {rows} rows x {context} keys"
            results.measure(name, lambda r=requests, n=rows, c=context: compare(r, n, c, device))
    return 1 if results.failures else 0


def compare(requests: int, rows: int, context: int, device: torch.device) -> dict[str, object]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pages = -(-context // PAGE)
    tables = torch.randperm(requests * pages, device=device).int().view(requests, pages)
    cache = torch.randn(2, requests * pages * PAGE, KV_HEADS, DIM, device=device).to(dtype)
    q = torch.randn(requests * rows, HEADS, DIM, device=device).to(dtype)
    starts = torch.arange(0, requests * rows + 1, rows, dtype=torch.int32, device=device)
    lens = torch.full((requests,), context, dtype=torch.int32, device=device)
    batch = PagedBatch(starts, lens, tables, PAGE, rows, context)
    scale = DIM**-0.5

    def ours() -> Tensor:
        return paged_attention(q, cache[0], cache[1], batch, scale)

    slots = (tables.long().unsqueeze(-1) * PAGE + torch.arange(PAGE, device=device)).flatten(1)[:, :context]
    k, v = (part[slots].transpose(1, 2).contiguous() for part in cache)  # [R, KV, S, D]
    padded = q.view(requests, rows, HEADS, DIM).transpose(1, 2)
    last = context - rows + torch.arange(rows, device=device)
    mask = torch.arange(context, device=device) <= last[:, None]

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(padded, k, v, attn_mask=mask, scale=scale, enable_gqa=True)

    expected = sdpa().transpose(1, 2).reshape(q.shape)
    found: dict[str, object] = {
        "largest_difference": float((ours() - expected).abs().max()),
        "triton_ms": stream_ms(ours, device),
        "sdpa_ms": stream_ms(sdpa, device),
    }
    others: dict[str, Callable[[], Callable[[], object]]] = {
        "flash_attn_ms": lambda: flash_attention(q, k, v, starts, requests, rows, context, scale),
        "flashinfer_ms": lambda: flash_infer(q, cache, batch, requests, context, dtype),
    }
    for name, make in others.items():
        try:
            found[name] = stream_ms(make(), device)
        except ImportError:
            found[name] = None  # not installed
        except Exception as error:  # another version's interface: said, not hidden
            found[name] = f"{type(error).__name__}: {error}"
    times = [
        t
        for name, t in found.items()
        if name.endswith("_ms") and name != "triton_ms" and isinstance(t, float)
    ]
    found["best_ratio"] = float(str(found["triton_ms"])) / min(times)
    found["gigabytes_read"] = 2 * requests * context * KV_HEADS * DIM * q.element_size() / 1e9
    return found


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, requests: int, rows: int, context: int, scale: float
) -> Callable[[], object]:
    from flash_attn import flash_attn_varlen_func

    flat_k, flat_v = (x.transpose(1, 2).reshape(requests * context, KV_HEADS, DIM) for x in (k, v))
    key_starts = torch.arange(0, requests * context + 1, context, dtype=torch.int32, device=q.device)
    return lambda: flash_attn_varlen_func(
        q, flat_k, flat_v, starts, key_starts, rows, context, softmax_scale=scale, causal=True
    )


def flash_infer(
    q: Tensor, cache: Tensor, batch: PagedBatch, requests: int, context: int, dtype: torch.dtype
) -> Callable[[], object]:
    import flashinfer

    pages = batch.block_tables.shape[1]
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        batch.query_start,
        torch.arange(0, requests * pages + 1, pages, dtype=torch.int32, device=q.device),
        batch.block_tables.flatten(),
        torch.full((requests,), (context - 1) % PAGE + 1, dtype=torch.int32, device=q.device),
        HEADS,
        KV_HEADS,
        DIM,
        PAGE,
        causal=True,
        q_data_type=dtype,
    )
    paged = tuple(part.view(-1, PAGE, KV_HEADS, DIM) for part in cache)
    return lambda: wrapper.run(q, paged)


if __name__ == "__main__":
    sys.exit(main())
