"""Section `attention`: the Triton kernel against what is installed, for verification's shapes.

SDPA gets its keys gathered and side by side, which costs it nothing here; the libraries are called as the
engine calls them, over pages (FlashAttention 2 over larger ones, its own rule). "best_ratio" is our time over
that of the fastest other one.
"""

import sys

import torch
import torch.nn.functional as F
from dspark_kernels.attention import PagedBatch, paged_attention
from dspark_kernels.attention_libraries import LIBRARIES, AttentionShape, LibraryMissingError, load_library
from timing import Results, arguments, stream_ms
from torch import Tensor

PAGE, LARGE_PAGE = 16, 256
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
    k, v = torch.randn(2, requests, context, KV_HEADS, DIM, device=device).to(dtype)
    q = torch.randn(requests * rows, HEADS, DIM, device=device).to(dtype)
    cache, batch = in_pages(k, v, rows, PAGE)
    scale = DIM**-0.5

    def ours() -> Tensor:
        return paged_attention(q, cache[0], cache[1], batch, scale)

    k, v = (part.transpose(1, 2).contiguous() for part in (k, v))  # [R, KV, S, D]
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
    for name in LIBRARIES:
        paged = (cache, batch)
        if name == "flash_attn":
            paged = in_pages(k.transpose(1, 2), v.transpose(1, 2), rows, LARGE_PAGE)
        found[f"{name}_ms"] = library_ms(name, q, *paged, scale, expected)
    times = [
        t
        for name, t in found.items()
        if name.endswith("_ms") and name != "triton_ms" and isinstance(t, float)
    ]
    found["best_ratio"] = float(str(found["triton_ms"])) / min(times)
    found["gigabytes_read"] = 2 * requests * context * KV_HEADS * DIM * q.element_size() / 1e9
    return found


def in_pages(k: Tensor, v: Tensor, rows: int, page: int) -> tuple[Tensor, PagedBatch]:
    """Keys and values [R, S, KV, D] in a cache [2, slots, KV, D] whose pages lie in random order."""
    requests, context = k.shape[:2]
    pages = -(-context // page)
    padding = (0, 0, 0, 0, 0, pages * page - context)
    both = torch.stack([F.pad(part, padding).view(requests * pages, page, KV_HEADS, DIM) for part in (k, v)])
    tables = torch.randperm(requests * pages)  # on the host, which FlashInfer plans on
    cache = torch.empty_like(both)
    cache[:, tables.to(k.device)] = both
    host = PagedBatch(
        query_start=torch.arange(requests + 1, dtype=torch.int32) * rows,
        kv_len=torch.full((requests,), context, dtype=torch.int32),
        block_tables=tables.int().view(requests, pages),
        block_size=page,
        max_query=rows,
        max_kv=context,
    )
    return cache.flatten(1, 2), host.to(k.device)


def library_ms(
    name: str, q: Tensor, cache: Tensor, batch: PagedBatch, scale: float, expected: Tensor
) -> float | str | None:
    """As the engine calls it, over the same pages; None where it is not installed, else why it cannot."""
    try:
        library = load_library(name)
        capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (0, 0)
        shape = AttentionShape(HEADS, KV_HEADS, DIM, q.dtype, q.dtype, batch.block_size, (None,), capability)
        if (reason := library.refusal(shape)) is not None:
            return reason
        difference = float((library(q, cache[0], cache[1], batch, scale) - expected).abs().max())
        if not difference <= 0.03 * float(expected.abs().max()):
            return f"differs by {difference:.3g}"
        return stream_ms(lambda: library(q, cache[0], cache[1], batch, scale), q.device)
    except LibraryMissingError:
        return None
    except Exception as error:  # another version's interface: said, not hidden
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
