"""Every Triton kernel equals the torch reference: here through Triton's interpreter, in tests/gpu compiled.

Shapes are ragged, block tables shuffled, sizes lie around every tile.
"""

import itertools

import numpy as np
import pytest
import torch
from dspark_kernels import torch_ops
from dspark_kernels.attention import PagedBatch
from dspark_kernels.linear import quantize_fp8, quantize_int8
from torch import Tensor

from dspark_ray.scheduling.survival import admit_top, survival
from tests.ragged_drafts import KINDS, ragged_drafts, rejection_case

pytest.importorskip("triton", reason="Triton is not installed: pip install 'dspark-ray[gpu]'")

from dspark_kernels import triton_ops
from dspark_kernels.triton_choose import _CHUNK, _TILE
from dspark_kernels.triton_interpreter import is_interpreted

# The interpreter is numpy: it warns of what a GPU does in silence (0 · ∞ where a mask hides it).
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DTYPES = (torch.float32, torch.bfloat16)
# As in test_kernels.py: fp32 sums differ in order only, bf16 may round the other way.
RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
OF_LARGEST = {torch.float32: 1e-5, torch.bfloat16: 4e-3}


@pytest.fixture(scope="module")
def device() -> torch.device:
    if not is_interpreted():
        pytest.skip("the kernels are compiled here: tests/gpu runs these cases")
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    largest = expected.float().abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(
        actual.float(),
        expected.float(),
        rtol=RELATIVE[expected.dtype],
        atol=OF_LARGEST[expected.dtype] * largest,
    )


def cases(*axes):
    return list(itertools.product(*axes))


# --- rows


@pytest.mark.parametrize(("dtype", "rows", "size"), cases(DTYPES, (0, 1, 3), (5, 64, 576, 1025)))
def test_norms(device, dtype, rows, size):
    x, residual = torch.randn(2, rows, size, device=device).to(dtype).unbind(0)
    x[:1] *= 1e-3  # where eps counts
    weight = torch.randn(size, device=device).to(dtype)
    assert_same(triton_ops.rms_norm(x, weight, 1e-5), torch_ops.rms_norm(x, weight, 1e-5))
    normed, total = triton_ops.add_rms_norm(x, residual, weight, 1e-5)
    expected_normed, expected_total = torch_ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    assert_same(normed, expected_normed)


@pytest.mark.parametrize(("dtype", "size"), cases(DTYPES, (7, 1023, 1024, 1025)))
def test_silu_mul(device, dtype, size):
    gate_up = (torch.randn(3, 2 * size, device=device) * 4).to(dtype)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, -88.0, 0.0])
    assert_same(triton_ops.silu_mul(gate_up), torch_ops.silu_mul(gate_up))


@pytest.mark.parametrize(
    ("dtype", "dim", "heads", "norms"), cases(DTYPES, (16, 96), ((1, 1), (9, 3)), (False, True))
)
def test_rope_and_stores(device, dtype, dim, heads, norms):
    num_heads, num_kv_heads = heads
    rows, cache_rows = 5, 40
    qkv = torch.randn(rows, (num_heads + 2 * num_kv_heads) * dim, device=device).to(dtype)
    angle = torch.rand(rows, dim // 2, device=device) * 6
    cos, sin = angle.cos(), angle.sin()
    q_norm, k_norm = (torch.rand(2, dim, device=device) + 0.5).to(dtype).unbind(0) if norms else (None, None)
    slots = torch.randperm(cache_rows, device=device)[:rows]
    slots[4] = -1
    shared = (cos, sin, num_heads, num_kv_heads, q_norm, k_norm, 1e-6)
    for actual, expected in zip(
        triton_ops.qkv_rope(qkv, *shared), torch_ops.qkv_rope(qkv, *shared), strict=True
    ):
        assert_same(actual, expected)
    caches = torch.zeros(2, cache_rows, 2, num_kv_heads, dim, dtype=dtype, device=device)
    results = [
        ops.qkv_rope_store(qkv, *shared, cache[:, 0], cache[:, 1], slots)
        for ops, cache in zip((triton_ops, torch_ops), caches, strict=True)
    ]
    assert_same(results[0], results[1])
    assert_same(caches[0], caches[1])
    assert (caches[0].abs().sum((1, 2, 3)) > 0).sum() == rows - 1
    caches.zero_()
    kv = qkv[:, num_heads * dim :].contiguous()
    for ops, cache in zip((triton_ops, torch_ops), caches, strict=True):
        ops.k_rope_store(kv, cos, sin, num_kv_heads, k_norm, 1e-6, cache[:, 0], cache[:, 1], slots)
    assert_same(caches[0], caches[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_stores_in_float8(device, dtype):
    heads, dim, rows, cache_rows = (6, 2), 16, 9, 12
    qkv = (torch.randn(rows, (heads[0] + 2 * heads[1]) * dim, device=device) * 3).to(dtype)
    qkv[2] *= 400  # past the largest number
    angle = torch.rand(rows, dim // 2, device=device)
    norms = (torch.rand(2, dim, device=device) + 0.5).to(dtype).unbind(0)
    slots = torch.randperm(cache_rows, device=device)[:rows]
    slots[4] = -1
    caches = torch.zeros(2, 2, cache_rows, heads[1], dim, dtype=torch.uint8, device=device)
    caches = caches.view(torch.float8_e4m3fn)
    for ops, (k_cache, v_cache) in zip((triton_ops, torch_ops), caches, strict=True):
        ops.qkv_rope_store(
            qkv, angle.cos(), angle.sin(), *heads, *norms, 1e-6, k_cache, v_cache, slots, 0.03, 1.7
        )
    # The rotation's last bit may round a key to its neighbour; values are copied.
    assert torch.equal(caches[0, 1].float(), caches[1, 1].float())
    differing = caches[0, 0].float() != caches[1, 0].float()
    assert differing.float().mean() < 0.02
    torch.testing.assert_close(caches[0, 0].float(), caches[1, 0].float(), rtol=0.14, atol=0.01)
    assert caches[0, 1].float().abs().max() == 448
    stored = caches[0, 1][slots[0]].float() * 1.7
    torch.testing.assert_close(
        stored, qkv[0, -heads[1] * dim :].view(heads[1], dim).float(), rtol=0.07, atol=0.01
    )


# --- attention


def make_batch(
    counts: list[int], contexts: list[int], block_size: int, device: torch.device
) -> tuple[PagedBatch, int]:
    """Requests with that many rows and keys, blocks in random order → the batch, the cache's rows."""
    blocks = [-(-length // block_size) for length in contexts]
    order = torch.randperm(sum(blocks) + 3)
    tables = torch.zeros(len(counts), max([*blocks, 1]), dtype=torch.int32)
    taken = 0
    for row, count in enumerate(blocks):
        tables[row, :count] = order[taken : taken + count]
        taken += count
    batch = PagedBatch(
        query_start=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device),
        kv_len=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        block_size=block_size,
        max_query=max(counts),
        max_kv=max(contexts),
    )
    return batch, len(order) * block_size


def make_tensors(batch, cache_rows, heads, dim, dtype, device):
    num_heads, num_kv_heads = heads
    rows = int(batch.query_start[-1])
    q = torch.randn(rows, num_heads, dim, device=device).to(dtype)
    k, v = torch.randn(2, rows, num_kv_heads, dim, device=device).to(dtype).unbind(0)
    cache = torch.randn(cache_rows, 2, num_kv_heads, dim, device=device).to(dtype)
    return q, k, v, cache[:, 0], cache[:, 1]


RAGGED = {
    "one row": ([1], [1]),
    "decode": ([1, 4, 2, 8], [5, 140, 65, 64]),
    "a chunk among them": ([1, 3, 17, 1], [9, 63, 70, 33]),
    "idle requests": ([0, 2, 0, 3, 0], [0, 32, 7, 31, 64]),
}


@pytest.mark.parametrize(
    ("dtype", "shape", "heads", "dim", "block_size", "splits"),
    [
        *cases(DTYPES, RAGGED, ((9, 3),), (32,), (16,), (1, 4)),
        *cases(DTYPES, ("decode",), ((4, 1),), (96,), (1,), (2,)),
        *cases((torch.bfloat16,), ("decode",), ((8, 2), (2, 2)), (128,), (4,), (1,)),
        *cases((torch.float32,), ("decode",), ((2, 2),), (8,), (16,), (None,)),
    ],
)
def test_attention(device, dtype, shape, heads, dim, block_size, splits):
    batch, cache_rows = make_batch(*RAGGED[shape], block_size, device)
    q, k_block, v_block, k_cache, v_cache = make_tensors(batch, cache_rows, heads, dim, dtype, device)
    scale = dim**-0.5
    expected = torch_ops.paged_attention(q, k_cache, v_cache, batch, scale)
    assert_same(triton_ops.paged_attention(q, k_cache, v_cache, batch, scale, splits=splits), expected)
    caches = (k_cache, v_cache)
    expected = torch_ops.block_attention(q, k_block, v_block, *caches, batch, scale)
    assert_same(
        triton_ops.block_attention(q, k_block, v_block, *caches, batch, scale, splits=splits), expected
    )


@pytest.mark.parametrize(
    ("dtype", "shape", "splits"), [*cases(DTYPES, ("decode", "a chunk among them"), (1, 2))]
)
def test_attention_over_float8(device, dtype, shape, splits):
    batch, cache_rows = make_batch(*RAGGED[shape], 16, device)
    q, _, _, *caches = make_tensors(batch, cache_rows, (6, 2), 32, dtype, device)
    caches = [cache.float().contiguous().to(torch.float8_e4m3fn) for cache in caches]
    expected = torch_ops.paged_attention(q, *(cache.to(dtype) for cache in caches), batch, 0.2)
    assert torch.equal(torch_ops.paged_attention(q, *caches, batch, 0.2), expected)
    assert_same(triton_ops.paged_attention(q, *caches, batch, 0.2, splits=splits), expected)


@pytest.mark.parametrize("keys", [31, 32, 33, 63, 64, 65])
@pytest.mark.parametrize("dtype", DTYPES)
def test_contexts_around_a_tile_of_keys(device, dtype, keys):
    batch, cache_rows = make_batch([1, 2, 7], [keys, keys + 1, keys + 32], 16, device)
    q, k_block, v_block, *caches = make_tensors(batch, cache_rows, (3, 1), 16, dtype, device)
    expected = torch_ops.paged_attention(q, *caches, batch, 0.25)
    for splits in (1, 2):
        assert_same(triton_ops.paged_attention(q, *caches, batch, 0.25, splits=splits), expected)
    expected = torch_ops.block_attention(q, k_block, v_block, *caches, batch, 0.25)
    assert_same(triton_ops.block_attention(q, k_block, v_block, *caches, batch, 0.25), expected)


@pytest.mark.parametrize("count", [7, 8, 9, 15, 16, 17, 33])
def test_rows_around_a_tile_of_queries(device, count):
    batch, cache_rows = make_batch([1, count, 1], [3, 40 + count, count], 16, device)
    q, k_block, v_block, *caches = make_tensors(batch, cache_rows, (8, 1), 16, torch.float32, device)
    expected = torch_ops.paged_attention(q, *caches, batch, 0.25)
    assert_same(triton_ops.paged_attention(q, *caches, batch, 0.25), expected)
    expected = torch_ops.block_attention(q, k_block, v_block, *caches, batch, 0.25)
    assert_same(triton_ops.block_attention(q, k_block, v_block, *caches, batch, 0.25), expected)


@pytest.mark.parametrize(
    ("dtype", "window", "splits", "soft_cap"), cases(DTYPES, (1, 5, 33, 64), (1, 4), (None,))
)
def test_windows(device, dtype, window, splits, soft_cap):
    batch, cache_rows = make_batch([1, 4, 20], [5, 140, 70], 16, device)
    q, _, _, *caches = make_tensors(batch, cache_rows, (3, 1), 16, dtype, device)
    expected = torch_ops.paged_attention(q, *caches, batch, 0.25, window)
    found = triton_ops.paged_attention(q, *caches, batch, 0.25, window, soft_cap, splits=splits)
    assert_same(found, expected)


@pytest.mark.parametrize(("dtype", "window"), cases(DTYPES, (None, 33)))
def test_soft_cap(device, dtype, window):
    batch, cache_rows = make_batch([1, 4, 20], [5, 140, 70], 16, device)
    q, _, _, *caches = make_tensors(batch, cache_rows, (4, 2), 16, dtype, device)
    expected = torch_ops.paged_attention(q * 20, *caches, batch, 0.25, window, 15.0)
    assert_same(triton_ops.paged_attention(q * 20, *caches, batch, 0.25, window, 15.0), expected)
    assert not torch.allclose(expected, torch_ops.paged_attention(q * 20, *caches, batch, 0.25, window))


@pytest.mark.parametrize("splits", [1, 4])
def test_one_key_too_many_is_seen(device, splits):
    batch, cache_rows = make_batch([4], [300], 16, device)
    q, _, _, *caches = make_tensors(batch, cache_rows, (9, 3), 32, torch.bfloat16, device)
    longer = PagedBatch(batch.query_start, batch.kv_len + 1, batch.block_tables, 16, 4, 301)
    expected = torch_ops.paged_attention(q, *caches, batch, 0.125)
    with pytest.raises(AssertionError):
        assert_same(triton_ops.paged_attention(q, *caches, longer, 0.125, splits=splits), expected)


@pytest.mark.parametrize("splits", [1, 2])
def test_unwritten_cache_rows_do_not_leak(device, splits):
    batch, cache_rows = make_batch([3, 1], [19, 70], 16, device)
    q, k_block, v_block, k_cache, v_cache = make_tensors(
        batch, cache_rows, (4, 2), 16, torch.bfloat16, device
    )
    used = torch.zeros(cache_rows, dtype=torch.bool, device=device)
    for r, length in enumerate(batch.kv_len.tolist()):
        for j in range(length):
            used[int(batch.block_tables[r, j // 16]) * 16 + j % 16] = True
    k_cache[~used] = float("nan")
    v_cache[~used] = float("nan")
    out = triton_ops.paged_attention(q, k_cache, v_cache, batch, 0.125, splits=splits)
    assert not out.isnan().any()
    out = triton_ops.block_attention(q, k_block, v_block, k_cache, v_cache, batch, 0.125, splits=splits)
    assert not out.isnan().any()


@pytest.mark.parametrize("splits", [1, 2])
def test_lengths_may_change_on_the_device_and_pad_rows_do_no_harm(device, splits):
    """One batch of static shape (8 rows, 4 requests), filled twice: what a captured graph replays."""
    starts, lens = torch.zeros(5, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    order = torch.randperm(40).int()[:36].view(4, 9)
    rows = torch.full((8,), -1, dtype=torch.int32)
    static = PagedBatch(*(t.to(device) for t in (starts, lens, order)), 16, 4, 144, rows.to(device))
    q, _, _, *caches = make_tensors_of(8, 640, (4, 2), 16, device)
    for counts, contexts in (([4, 1, 2], [140, 9, 65]), ([1, 1], [1, 33])):
        total = sum(counts)
        static.query_start.copy_(
            torch.tensor([0, *itertools.accumulate(counts)] + [total] * (4 - len(counts)))
        )
        static.kv_len.copy_(torch.tensor(contexts + [0] * (4 - len(counts))))
        static.row_request.fill_(-1)[:total] = torch.arange(len(counts)).repeat_interleave(
            torch.tensor(counts)
        )
        exact = PagedBatch(
            static.query_start[: len(counts) + 1].clone(),
            static.kv_len[: len(counts)].clone(),
            static.block_tables[: len(counts)],
            16,
            max(counts),
            max(contexts),
        )
        found = triton_ops.paged_attention(q, *caches, static, 0.25, splits=splits)
        assert_same(found[:total], torch_ops.paged_attention(q[:total], *caches, exact, 0.25))
        assert not found[total:].any()
        found = triton_ops.block_attention(q, q[:, :2], q[:, 2:], *caches, static, 0.25, splits=splits)
        expected = torch_ops.block_attention(q[:total], q[:total, :2], q[:total, 2:], *caches, exact, 0.25)
        assert_same(found[:total], expected)


def make_tensors_of(rows, cache_rows, heads, dim, device):
    q = torch.randn(rows, heads[0], dim, device=device)
    k, v = torch.randn(2, rows, heads[1], dim, device=device).unbind(0)
    k_cache, v_cache = torch.randn(2, cache_rows, heads[1], dim, device=device).unbind(0)
    return q, k, v, k_cache, v_cache


# --- choices


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 31, _TILE, _TILE + 1, _CHUNK, _CHUNK + 1, 2 * _CHUNK + 5])
def test_argmax_takes_the_first_of_the_largest(device, dtype, size):
    x = torch.randn(3, size, device=device).to(dtype)
    x[0] = -3.0
    x[1, size // 2 :] = 9.0
    x[2] = float("-inf")
    expected = [int((row == row.max()).nonzero()[0]) for row in x]
    assert triton_ops.argmax(x).tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("requests", "rank", "vocab"), [(1, 8, 40), (3, 64, 129), (17, 65, 128)])
def test_markov_chain(device, dtype, requests, rank, vocab):
    base = torch.randn(requests, 3, vocab, device=device).to(dtype)
    w1 = torch.randn(2 * vocab, rank, device=device).to(dtype)
    w2 = torch.randn(rank, vocab, device=device).to(dtype)
    anchors = torch.randint(0, 2 * vocab, (requests,), device=device)
    for vocab_map in (None, torch.arange(vocab, device=device) * 2 + 1):
        expected = torch_ops.markov_chain(base, w1, w2, anchors, vocab_map)
        found = triton_ops.markov_chain(base, w1, w2, anchors, vocab_map)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
    logits = triton_ops.markov_logits(base[:, 1], w1, w2, anchors)
    assert_same(logits, torch_ops.markov_logits(base[:, 1], w1, w2, anchors))


@pytest.mark.parametrize("size", [1, 7, _TILE + 1, _CHUNK + 3])
def test_noisy_argmax(device, size):
    scale = torch.linspace(0.1, 20, 9, device=device)[:, None]
    probs = torch.softmax(torch.randn(9, size, device=device) * scale, dim=-1)
    probs[::3, size // 2 + 1 :] = 0.0
    keys = torch.randint(-(2**63), 2**63 - 1, (9,), device=device)
    for columns in (None, torch.randperm(9 * size, device=device)[:size]):
        found = triton_ops.noisy_argmax(probs, keys, columns)
        assert torch.equal(found, torch_ops.noisy_argmax(probs, keys, columns))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [5, 4099])
def test_filtered_probs(device, dtype, size):
    logits = (torch.randn(6, size, device=device) * 3).to(dtype)
    logits[3, 2:] = float("-inf")
    logits[4] = 0.0  # ties

    def column(*values: float) -> Tensor:
        return torch.tensor(values, device=device)[:, None]

    temperature = column(1.0, 0.3, 2.0, 1.0, 1.0, 1.0)
    top_k = column(size, 3, 2, 4, 3, size).long()
    top_p = column(1.0, 0.9, 0.5, 0.7, 0.5, 0.97)
    min_p = column(0.0, 0.1, 0.0, 0.2, 0.0, 0.02)
    for filters in (
        (None, None, None),
        (top_k, None, None),
        (None, top_p, None),
        (None, None, min_p),
        (top_k, top_p, min_p),
    ):
        expected = torch_ops.filtered_probs(logits, temperature, *filters)
        found = triton_ops.filtered_probs(logits, temperature, *filters)
        assert torch.equal(found > 0, expected > 0)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("dtype", "rows", "size"), cases(DTYPES, (1, 17), ((65, 96), (64, 129))))
def test_scaled_linear(device, dtype, rows, size, kind):
    quantise = quantize_int8 if kind == torch.int8 else quantize_fp8
    values, scales = quantise(torch.randn(size, device=device))
    assert values.dtype == kind
    x = torch.randn(rows, size[1], device=device).to(dtype)
    for bias in (None, torch.randn(size[0], device=device).to(dtype)):
        expected = torch_ops.scaled_linear(x, values, scales, bias)
        assert_same(triton_ops.scaled_linear(x, values, scales, bias), expected)


# --- acceptance


@pytest.mark.parametrize("lengths", [[0], [3], [7, 8, 0, 15, 1], [16, 4]])
def test_leading_matches(device, lengths):
    rows, start, drafted = ragged_drafts(lengths, 2, device)
    for chosen in (drafted, 1 - drafted, torch.randint(0, 2, (rows,), device=device)):
        found = triton_ops.leading_matches(chosen, drafted, start, max(lengths))
        expected = torch_ops.leading_matches(chosen, drafted, start, max(lengths))
        assert [t.tolist() for t in found] == [t.tolist() for t in expected]
    count, following = triton_ops.leading_matches(drafted, drafted, start, max(lengths))
    assert count.tolist() == lengths
    assert following.tolist() == drafted[start[1:].long() - 1].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [6, _TILE + 2, _CHUNK + 9])
def test_rejection(device, vocab, kind):
    case = rejection_case(kind, vocab, device)
    found, expected = triton_ops.accept(*case), torch_ops.accept(*case)
    assert [t.tolist() for t in found] == [t.tolist() for t in expected]


def test_a_refused_token_is_not_drawn_again(device):
    requests, vocab = 40, 5
    _, start, drafted = ragged_drafts([1] * requests, vocab, device)
    probs = torch.full((2 * requests, vocab), 0.025, device=device)
    probs[torch.arange(2 * requests, device=device), drafted] = 0.9
    uniforms = torch.full((2 * requests,), 0.95, dtype=torch.float64, device=device)
    keys = torch.arange(requests, device=device) * 7919
    counts, following = triton_ops.accept(probs, drafted, start, 1, uniforms, keys, None, None, None, None)
    assert not counts.any()
    assert not (following == drafted[::2]).any()


def test_the_rejection_rule_gives_the_targets_law(device):
    """γ = 1 over many requests: the first emitted token is distributed as p, whatever q is."""
    count = 100 if device.type == "cpu" else 20_000
    for ops, many in ((torch_ops, 20_000), (triton_ops, count)):
        p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.1, 0.2, 0.3, 0.4])
        drafted = torch.multinomial(q, 2 * many, replacement=True)
        counts, following = ops.accept(
            p.repeat(2 * many, 1).to(device),
            drafted.to(device),
            torch.arange(0, 2 * many + 1, 2, dtype=torch.int32, device=device),
            1,
            torch.rand(2 * many, dtype=torch.float64).to(device),
            torch.randint(-(2**63), 2**63 - 1, (many,)).to(device),
            q.repeat(2 * many, 1).to(device),
            None,
            None,
            None,
        )
        first = torch.where(counts.cpu() > 0, drafted[::2], following.cpu())
        observed = torch.bincount(first, minlength=4).double()
        assert observed[3] == 0
        expected = p[:3].double() * many
        assert float(((observed[:3] - expected).square() / expected).sum()) < 14  # χ² of 2 degrees, p = .001


# --- admission


@pytest.mark.parametrize(("requests", "block"), [(1, 1), (1, 7), (5, 7), (16, 8), (129, 3)])
def test_survival_lengths(device, requests, block):
    confidences = torch.rand(requests, block)
    confidences[::2] = (confidences[::2] * 4).round() / 4  # many ties, ones and zeros
    confidences[-1, -1] = float("nan")
    max_lens = torch.randint(0, block + 1, (requests,), dtype=torch.int32)
    for budget in (0, 1, requests, int(max_lens.sum()), requests * block + 5):
        host = admit_top(survival(confidences.numpy()), budget, max_lens.numpy())
        limit = torch.tensor([budget], dtype=torch.int32)
        for ops in (torch_ops, triton_ops):
            lens = ops.survival_lengths(confidences.to(device), limit.to(device), max_lens.to(device))
            assert np.array_equal(lens.cpu().numpy(), host)
