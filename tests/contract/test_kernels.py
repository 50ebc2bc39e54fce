"""Every op: the compiled CPU version equals the torch reference, and the reference equals a naive loop.

Skipped as a whole where no C++ compiler builds the CPU version, but for the reference's own tests.
"""

import itertools

import pytest
import torch
from dspark_kernels import dispatch, huge_pages, linear, torch_ops
from dspark_kernels.attention import PagedBatch, block_attention, paged_attention
from dspark_kernels.cpu_build import BuildError, load_library
from dspark_kernels.cpu_ops import CpuOps
from dspark_kernels.linear import PackedLinear
from torch import Tensor

from tests.ragged_drafts import KINDS, rejection_case

DTYPES = (torch.float32, torch.bfloat16)
# fp32 sums differ in order only; a bf16 result may round the other way (2^-7 of itself at most), and
# attention's weights are bf16 too (a little of the largest result).
RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
OF_LARGEST = {torch.float32: 1e-5, torch.bfloat16: 4e-3}


@pytest.fixture(autouse=True)
def _quiet_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def cpu() -> CpuOps:
    try:
        return CpuOps(load_library())
    except BuildError as error:
        pytest.skip(f"no CPU version here: {error}")


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal but for rounding: of each value, and of the largest value where sums cancel."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    largest = expected.float().abs().max().item()
    torch.testing.assert_close(
        actual.float(),
        expected.float(),
        rtol=RELATIVE[expected.dtype],
        atol=OF_LARGEST[expected.dtype] * largest,
    )


def cases(*axes):
    return list(itertools.product(*axes))


# --- norm, activation
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "rows", "size"), cases(DTYPES, (0, 1, 3, 65), (5, 64, 100, 576)))
def test_norms_equal_the_reference(cpu, dtype, rows, size):
    x, residual = torch.randn(2, rows, size).to(dtype).unbind(0)
    weight = torch.randn(size).to(dtype)
    if rows == 0:
        assert cpu.rms_norm(x, weight, 1e-5).shape == (0, size)
        return
    assert_same(cpu.rms_norm(x, weight, 1e-5), torch_ops.rms_norm(x, weight, 1e-5))
    normed, total = cpu.add_rms_norm(x, residual, weight, 1e-5)
    expected_normed, expected_total = torch_ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    assert_same(normed, expected_normed)


@pytest.mark.parametrize(("dtype", "size"), cases(DTYPES, (7, 32, 100, 1536)))
def test_silu_mul_equals_the_reference(cpu, dtype, size):
    gate_up = (torch.randn(9, 2 * size) * 4).to(dtype)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, -88.0, 0.0])
    assert_same(cpu.silu_mul(gate_up), torch_ops.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_stays_a_nan(cpu, dtype):
    x = torch.randn(2, 64).to(dtype)
    x[0, 3] = float("nan")
    normed = cpu.rms_norm(x, torch.ones(64, dtype=dtype), 1e-5)
    assert normed[0].isnan().all()
    assert not normed[1].isnan().any()
    assert cpu.silu_mul(x).isnan().sum() == 1


# --- RoPE and cache stores
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "dim", "heads", "norms"),
    cases(DTYPES, (16, 32, 64, 128), ((1, 1), (9, 3), (8, 2)), (False, True)),
)
def test_rope_equals_the_reference(cpu, dtype, dim, heads, norms):
    num_heads, num_kv_heads = heads
    rows, cache_rows = 11, 40
    qkv = torch.randn(rows, (num_heads + 2 * num_kv_heads) * dim).to(dtype)
    angle = torch.rand(rows, dim // 2) * 6
    cos, sin = angle.cos(), angle.sin()
    q_norm, k_norm = (torch.rand(2, dim) + 0.5).to(dtype).unbind(0) if norms else (None, None)
    slots = torch.randperm(cache_rows)[:rows]
    slots[4] = -1
    shared = (cos, sin, num_heads, num_kv_heads, q_norm, k_norm, 1e-6)
    for actual, expected in zip(cpu.qkv_rope(qkv, *shared), torch_ops.qkv_rope(qkv, *shared), strict=True):
        assert_same(actual, expected)

    # The cache is a slice of a larger one, as in a model: rows are further apart than their size.
    caches = torch.zeros(2, cache_rows, 2, num_kv_heads, dim, dtype=dtype)
    results = []
    for ops, cache in zip((cpu, torch_ops), caches, strict=True):
        results.append(ops.qkv_rope_store(qkv, *shared, cache[:, 0], cache[:, 1], slots))
    assert_same(results[0], results[1])
    assert_same(caches[0], caches[1])
    assert (caches[0].abs().sum((1, 2, 3)) > 0).sum() == rows - 1

    caches.zero_()
    kv = qkv[:, num_heads * dim :]
    for ops, cache in zip((cpu, torch_ops), caches, strict=True):
        ops.k_rope_store(kv, cos, sin, num_kv_heads, k_norm, 1e-6, cache[:, 0], cache[:, 1], slots)
    assert_same(caches[0], caches[1])


# --- attention
# ----------------------------------------------------------------------------------------------------


def make_batch(
    counts: list[int], contexts: list[int], block_size: int, *, spare: int
) -> tuple[PagedBatch, int]:
    """Requests with that many rows and keys, blocks in random order → the batch, the cache's rows."""
    blocks = [-(-length // block_size) for length in contexts]
    order = torch.randperm(sum(blocks) + spare)
    tables = torch.zeros(len(counts), max([*blocks, 1]), dtype=torch.int32)
    at = 0
    for r, n in enumerate(blocks):
        tables[r, :n] = order[at : at + n]
        at += n
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    kv_len = torch.tensor(contexts, dtype=torch.int32)
    batch = PagedBatch(starts, kv_len, tables, block_size, max(counts), max(contexts))
    return batch, (sum(blocks) + spare) * block_size


def naive_attention(
    q, k_block, v_block, k_cache, v_cache, batch: PagedBatch, scale: float, window: int = 1 << 30
) -> Tensor:
    """One row at a time, in fp64; causal when there is no block of its own."""
    out = torch.empty_like(q, dtype=torch.float64)
    group = q.shape[1] // k_cache.shape[1]
    starts, contexts, tables = (x.tolist() for x in (batch.query_start, batch.kv_len, batch.block_tables))
    for r, context in enumerate(contexts):
        size, own = batch.block_size, slice(starts[r], starts[r + 1])
        at = [tables[r][j // size] * size + j % size for j in range(context)]
        k, v = k_cache[at].double(), v_cache[at].double()
        if k_block is not None:
            k, v = torch.cat([k, k_block[own].double()]), torch.cat([v, v_block[own].double()])
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        for row in range(starts[r], starts[r + 1]):
            seen = len(k) if k_block is not None else context - (starts[r + 1] - row) + 1
            keys = slice(max(0, seen - window), seen)
            scores = torch.einsum("hd,khd->hk", q[row].double(), k[keys]) * scale
            out[row] = torch.einsum("hk,khd->hd", torch.softmax(scores, -1), v[keys])
    return out.to(q.dtype)


def make_tensors(
    batch: PagedBatch, cache_rows: int, num_heads: int, num_kv_heads: int, dim: int, dtype: torch.dtype
):
    rows = int(batch.query_start[-1])
    q = torch.randn(rows, num_heads, dim).to(dtype)
    k_block, v_block = torch.randn(2, rows, num_kv_heads, dim).to(dtype).unbind(0)
    cache = torch.randn(cache_rows, 2, num_kv_heads, dim).to(dtype)  # interleaved: strided rows
    return q, k_block, v_block, cache[:, 0], cache[:, 1]


MIXED = ([1, 4, 40, 8, 1], [1, 9, 130, 300, 64])
RAGGED = {
    "one row": ([1], [1]),
    "decode": ([1, 4, 2, 8], [5, 300, 65, 128]),
    "mixed": MIXED,
    "whole prompts": ([33, 100], [33, 100]),
    "long": ([3], [700]),
    "an idle request": ([2, 0, 3], [10, 7, 3]),
}
HEADS = ((3, 3), (9, 3), (4, 1))


@pytest.mark.parametrize("shape", ["decode", "mixed"])
def test_the_reference_equals_a_naive_loop(shape):
    batch, cache_rows = make_batch(*RAGGED[shape], 16, spare=3)
    q, k_block, v_block, k_cache, v_cache = make_tensors(batch, cache_rows, 3, 1, 32, torch.float32)
    expected = naive_attention(q, None, None, k_cache, v_cache, batch, 0.2)
    assert_same(torch_ops.paged_attention(q, k_cache, v_cache, batch, 0.2), expected)
    expected = naive_attention(q, k_block, v_block, k_cache, v_cache, batch, 0.2)
    assert_same(torch_ops.block_attention(q, k_block, v_block, k_cache, v_cache, batch, 0.2), expected)


@pytest.mark.parametrize(
    ("dtype", "shape", "heads", "dim", "block_size"),
    [
        *cases(DTYPES, RAGGED, HEADS, (64,), (16,)),
        *cases(DTYPES, ("mixed",), HEADS, (32, 96, 128, 16), (1, 4)),
    ],
)
def test_attention_equals_the_reference(cpu, dtype, shape, heads, dim, block_size):
    batch, cache_rows = make_batch(*RAGGED[shape], block_size, spare=5)
    q, k_block, v_block, k_cache, v_cache = make_tensors(batch, cache_rows, *heads, dim, dtype)
    scale = dim**-0.5
    expected = torch_ops.paged_attention(q, k_cache, v_cache, batch, scale)
    assert_same(cpu.paged_attention(q, k_cache, v_cache, batch, scale), expected)
    expected = torch_ops.block_attention(q, k_block, v_block, k_cache, v_cache, batch, scale)
    assert_same(cpu.block_attention(q, k_block, v_block, k_cache, v_cache, batch, scale), expected)


@pytest.mark.parametrize(
    ("dtype", "shape", "window"), cases(DTYPES, ("decode", "mixed", "long"), (1, 5, 64, 129, 300))
)
def test_attention_in_a_window_equals_a_naive_loop(cpu, dtype, shape, window):
    batch, cache_rows = make_batch(*RAGGED[shape], 16, spare=3)
    q, _, _, k_cache, v_cache = make_tensors(batch, cache_rows, 9, 3, 64, dtype)
    expected = naive_attention(q, None, None, k_cache, v_cache, batch, 0.125, window)
    assert_same(torch_ops.paged_attention(q, k_cache, v_cache, batch, 0.125, window), expected)
    together = cpu.paged_attention(q, k_cache, v_cache, batch, 0.125, window)
    assert_same(together, expected)
    torch.set_num_threads(2)
    assert torch.equal(cpu.paged_attention(q, k_cache, v_cache, batch, 0.125, window), together)


@pytest.mark.parametrize("dtype", DTYPES)
def test_block_attention_without_context(cpu, dtype):
    batch, cache_rows = make_batch([7, 7, 3], [0, 20, 0], 16, spare=1)
    tensors = make_tensors(batch, cache_rows, 9, 3, 64, dtype)
    expected = naive_attention(*tensors, batch, 0.125)
    assert_same(cpu.block_attention(*tensors, batch, 0.125), expected)
    assert_same(torch_ops.block_attention(*tensors, batch, 0.125), expected)


@pytest.mark.parametrize(("dtype", "ops_name"), cases(DTYPES, ("cpu", "torch")))
def test_the_comparison_sees_one_wrong_key(request, dtype, ops_name):
    """A planted fault (one key too many for the first row of a request) must not pass for a rounding."""
    ops = request.getfixturevalue("cpu") if ops_name == "cpu" else torch_ops
    batch, cache_rows = make_batch([4], [300], 16, spare=2)
    q, _, _, k_cache, v_cache = make_tensors(batch, cache_rows, 9, 3, 64, dtype)
    longer = PagedBatch(batch.query_start, batch.kv_len + 1, batch.block_tables, 16, 4, 301)
    result = ops.paged_attention(q, k_cache, v_cache, longer, 0.125)
    with pytest.raises(AssertionError):
        assert_same(result, naive_attention(q, None, None, k_cache, v_cache, batch, 0.125))


@pytest.mark.parametrize("dtype", DTYPES)
def test_unwritten_cache_rows_do_not_leak(cpu, dtype):
    batch, cache_rows = make_batch([3, 1], [19, 70], 16, spare=2)
    q, k_block, v_block, k_cache, v_cache = make_tensors(batch, cache_rows, 9, 3, 64, dtype)
    used = torch.zeros(cache_rows, dtype=torch.bool)
    for r, length in enumerate(batch.kv_len.tolist()):
        for j in range(length):
            used[int(batch.block_tables[r, j // 16]) * 16 + j % 16] = True
    k_cache[~used] = float("nan")
    v_cache[~used] = float("nan")
    assert not cpu.paged_attention(q, k_cache, v_cache, batch, 0.125).isnan().any()
    assert not cpu.block_attention(q, k_block, v_block, k_cache, v_cache, batch, 0.125).isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_in_a_batch_and_on_any_threads(cpu, dtype):
    batch, cache_rows = make_batch([4, 40, 8, 1], [700, 130, 300, 64], 16, spare=3)
    q, _, _, k_cache, v_cache = make_tensors(batch, cache_rows, 9, 3, 64, dtype)
    together = cpu.paged_attention(q, k_cache, v_cache, batch, 0.125)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for r in range(4):
            begin, end = batch.query_start[r : r + 2].tolist()
            for row in {begin, end - 1}:
                alone = PagedBatch(
                    torch.tensor([0, 1], dtype=torch.int32),
                    batch.kv_len[r : r + 1] - (end - 1 - row),
                    batch.block_tables[r : r + 1],
                    16,
                    1,
                    int(batch.kv_len[r]),
                )
                single = cpu.paged_attention(q[row : row + 1], k_cache, v_cache, alone, 0.125)
                assert torch.equal(single[0], together[row])


# --- linear
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "rows", "bias", "size"),
    cases(DTYPES, (0, 1, 5, 13, 70), (False, True), ((96, 160), (50, 31), (33, 64))),
)
def test_packed_linear_equals_linear(dtype, rows, bias, size):
    weight, offset = torch.randn(size).to(dtype), torch.randn(size[0]).to(dtype) if bias else None
    x = torch.randn(rows, size[1]).to(dtype)
    with torch.inference_mode():
        packed = PackedLinear(weight, offset)
        assert (packed.out_features, packed.in_features) == size
        result = packed(x)
    assert result.shape == (rows, size[0])
    if rows:
        exact = torch.nn.functional.linear(
            x.double(), weight.double(), None if offset is None else offset.double()
        )
        assert_same(result, exact.to(dtype))


def test_each_layout_of_a_linear_equals_the_plain_one(cpu):
    weight, offset, x = (
        torch.randn(96, 64).bfloat16(),
        torch.randn(96).bfloat16(),
        torch.randn(7, 64).bfloat16(),
    )
    expected = linear._plain(weight, offset)(x)
    assert_same(cpu_linear(cpu, weight, offset)(x), expected)
    onednn = linear._onednn(weight, offset)
    if onednn is not None:
        assert_same(onednn(x), expected)


def cpu_linear(cpu, weight, offset):
    if not cpu.has_linear:
        pytest.skip("this CPU has no compiled linear")
    matrix = cpu.pack(weight, offset)
    return lambda x: cpu.multiply(x, matrix)


def test_a_row_of_a_linear_has_the_same_bits_in_any_batch(cpu):
    multiply = cpu_linear(cpu, torch.randn(100, 576).bfloat16(), None)
    x = torch.randn(40, 576).bfloat16()
    together = multiply(x)
    for rows in (1, 2, 7, 13, 39):
        assert torch.equal(multiply(x[:rows]), together[:rows])


@pytest.mark.parametrize("size", [(96, 64), (33, 96), (40, 50), (5, 31)])
@pytest.mark.parametrize("rows", [0, 1, 20, 45])
def test_an_int8_linear_is_the_linear_of_its_dequantised_weights(size, rows):
    weight, offset = torch.randn(size).bfloat16(), torch.randn(size[0]).bfloat16()
    weight[1] = 0.0  # a row whose scale is 0
    quantized, scales = linear.quantize_int8(weight)
    x = torch.randn(rows, size[1]).bfloat16()
    plain = PackedLinear((quantized.float() * scales.unsqueeze(1)).bfloat16(), offset)
    assert torch.equal(linear.Int8Linear(weight, offset)(x), plain(x))


def test_int8_rounds_to_the_nearest_of_255_steps():
    weight = torch.randn(17, 300)
    quantized, scales = linear.quantize_int8(weight)
    assert quantized.abs().amax(1).tolist() == [127] * 17
    error = (quantized.float() * scales.unsqueeze(1) - weight).abs()
    assert (error <= scales.unsqueeze(1) * 0.5001).all()


def test_huge_page_tensors_are_separate_and_aligned():
    first, second = huge_pages.empty((3, 5), torch.float32), huge_pages.empty((7,), torch.bfloat16)
    big = huge_pages.empty((huge_pages.CHUNK_BYTES + 100,), torch.uint8)
    first.fill_(1), second.fill_(2), big.fill_(3)
    assert (first.sum(), second.sum()) == (15, 14)
    assert all(x.data_ptr() % huge_pages.ALIGNMENT == 0 for x in (first, second, big))


# --- dispatch
# -----------------------------------------------------------------------------------------------------


def test_nonsense_in_the_environment_fails(monkeypatch):
    monkeypatch.setenv(dispatch.ENV_VARIABLE, "fast")
    with pytest.raises(ValueError, match="auto, triton, torch, cpu"):
        dispatch.requested_version()


def test_no_compiler_means_the_reference_or_an_error(monkeypatch, caplog):
    def broken():
        raise BuildError("no C++ compiler")

    monkeypatch.setattr(dispatch, "load_library", broken)
    assert dispatch.choose("auto") is torch_ops
    assert "no C++ compiler" in caplog.text
    with pytest.raises(BuildError):
        dispatch.choose("cpu")
    assert dispatch.choose("torch") is torch_ops


def test_gradients_and_other_types_use_the_reference():
    x = torch.randn(2, 64)
    assert dispatch.ops_for(x.double()) is torch_ops
    assert dispatch.ops_for(x, torch.ones(64, requires_grad=True)) is torch_ops
    with torch.no_grad():
        assert dispatch.ops_for(x, torch.ones(64, requires_grad=True)) is dispatch.cpu_version()


def test_the_public_functions_run_the_chosen_version():
    batch, cache_rows = make_batch([2, 1], [5, 9], 4, spare=1)
    q, k_block, v_block, k_cache, v_cache = make_tensors(batch, cache_rows, 3, 1, 32, torch.float32)
    expected = naive_attention(q, None, None, k_cache, v_cache, batch, 0.2)
    assert_same(paged_attention(q, k_cache, v_cache, batch, 0.2), expected)
    expected = naive_attention(q, k_block, v_block, k_cache, v_cache, batch, 0.2)
    assert_same(block_attention(q, k_block, v_block, k_cache, v_cache, batch, 0.2), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 5, 31, 1024, 1025, 5000])
def test_argmax_takes_the_first_of_the_largest(cpu: CpuOps, dtype: torch.dtype, size: int) -> None:
    x = torch.randn(7, size).to(dtype)
    x[0] = -3.0
    x[1, size // 2 :] = 9.0
    x[2] = float("-inf")
    expected = [int((row == row.max()).nonzero()[0]) for row in x]
    assert cpu.argmax(x).tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("requests", "rank", "vocab"), [(1, 8, 40), (3, 64, 1500), (9, 5, 1024)])
def test_markov_chain(cpu: CpuOps, dtype: torch.dtype, requests: int, rank: int, vocab: int) -> None:
    base = torch.randn(requests, 4, vocab).to(dtype)
    w1, w2 = torch.randn(2 * vocab, rank).to(dtype), torch.randn(rank, vocab).to(dtype)
    anchors = torch.randint(0, 2 * vocab, (requests,))
    for vocab_map in (None, torch.arange(vocab) * 2 + 1):
        expected = torch_ops.markov_chain(base, w1, w2, anchors, vocab_map)
        found = cpu.markov_chain(base, w1, w2, anchors, vocab_map)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
    flipped = cpu.markov_chain(base, w1, -w2, anchors, None)[0]
    assert not torch.equal(flipped, cpu.markov_chain(base, w1, w2, anchors, None)[0])


@pytest.mark.parametrize("size", [1, 7, 1000, 5000])
def test_noisy_argmax(cpu: CpuOps, size: int) -> None:
    """The compiled version passes over most tokens without looking at their noise: it must find the same."""
    probs = torch.softmax(torch.randn(40, size) * torch.linspace(0.1, 20, 40)[:, None], dim=-1)
    probs[::3, size // 2 + 1 :] = 0.0
    keys = torch.randint(-(2**63), 2**63 - 1, (40,))
    ids = torch.randperm(9 * size)[:size]
    for columns in (None, ids):
        found = cpu.noisy_argmax(probs, keys, columns)
        assert torch.equal(found, torch_ops.noisy_argmax(probs, keys, columns))
        assert (probs.gather(1, found[:, None]) > 0).all()


def test_noise_belongs_to_key_and_id() -> None:
    """A part of a vocabulary, in any order, meets the noise its tokens have in the whole."""
    probs, keys = torch.rand(50, 64), torch.arange(50)
    whole = torch_ops.noisy_argmax(probs, keys, None)
    order = torch.randperm(64)
    assert torch.equal(order[torch_ops.noisy_argmax(probs[:, order], keys, order)], whole)
    assert not torch.equal(torch_ops.noisy_argmax(probs, keys + 1, None), whole)


def test_noisy_argmax_draws_from_p(cpu: CpuOps) -> None:
    probs = torch.tensor([0.5, 0.25, 0.15, 0.0, 0.08, 0.02])
    count = 60_000
    drawn = cpu.noisy_argmax(probs.repeat(count, 1), torch.arange(count) * 7919, None)
    observed = torch.bincount(drawn, minlength=6).double()
    kept = probs > 0
    expected = probs[kept].double() * count
    assert observed[3] == 0
    assert float(((observed[kept] - expected).square() / expected).sum()) < 4 + 4 * 8**0.5  # χ² of 4 degrees


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [5, 4099, 49152])
@pytest.mark.parametrize("threads", [1, 3])
def test_filtered_probs(cpu: CpuOps, dtype: torch.dtype, size: int, threads: int) -> None:
    torch.set_num_threads(threads)
    logits = (torch.randn(7, size) * 3).to(dtype)
    logits[3, 2:] = float("-inf")
    logits[4] = 0.0  # ties
    logits[6, 1] = 200.0  # next to it all others vanish

    def column(*values: float) -> Tensor:
        return torch.tensor(values)[:, None]

    temperature = column(1.0, 0.3, 2.0, 1.0, 1.0, 1.0, 0.5)
    top_k = column(size, 3, 2, 4, 3, size, 1).long()
    top_p = column(1.0, 0.9, 0.5, 0.7, 0.5, 0.97, 0.3)
    min_p = column(0.0, 0.1, 0.0, 0.2, 0.0, 0.02, 0.0)
    for filters in (
        (None, None, None),
        (top_k, None, None),
        (None, top_p, None),
        (None, None, min_p),
        (top_k, top_p, min_p),
    ):
        expected = torch_ops.filtered_probs(logits, temperature, *filters)
        found = cpu.filtered_probs(logits, temperature, *filters)
        kept = expected > 1e-37  # what is smaller may be 0
        assert torch.equal(found > 1e-37, kept)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-7)
        alone = cpu.filtered_probs(
            logits[1:2], temperature[1:2], *(f if f is None else f[1:2] for f in filters)
        )
        assert torch.equal(alone[0], found[1])


@pytest.mark.parametrize("size", [1, 7, 512, 5000])
def test_inverse_cdf(cpu: CpuOps, size: int) -> None:
    weights = torch.rand(40, size) ** 8
    weights[::3, size // 2 + 1 :] = 0.0
    weights[1::3, : size // 2] = 0.0
    uniforms = torch.rand(40, dtype=torch.float64)
    uniforms[:8] = torch.tensor([0.0, 1 - 2**-53] * 4, dtype=torch.float64)
    cdf = weights.double().cumsum(-1)
    for draw in (cpu.inverse_cdf, torch_ops.inverse_cdf):
        found = draw(weights, uniforms)[:, None]
        target = uniforms[:, None] * cdf[:, -1:]
        slack = 1e-6 * cdf[:, -1:]
        assert (weights.gather(1, found) > 0).all()
        assert (cdf.gather(1, found) > target - slack).all()
        assert (cdf.gather(1, found) - weights.gather(1, found) <= target + slack).all()


def test_inverse_cdf_draws_from_its_weights(cpu: CpuOps) -> None:
    weights = torch.tensor([1.0, 0.0, 0.5, 2.5]).repeat(40_000, 1)
    drawn = cpu.inverse_cdf(weights, torch.rand(40_000, dtype=torch.float64))
    shares = torch.bincount(drawn, minlength=4) / 40_000
    assert shares.tolist() == pytest.approx([0.25, 0.0, 0.125, 0.625], abs=0.012)  # 5 standard deviations


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("requests", "rank", "vocab"), [(1, 8, 40), (3, 64, 1500), (9, 5, 1024)])
def test_markov_logits(cpu: CpuOps, dtype: torch.dtype, requests: int, rank: int, vocab: int) -> None:
    base = torch.randn(requests, vocab).to(dtype)
    w1, w2 = torch.randn(2 * vocab, rank).to(dtype), torch.randn(rank, vocab).to(dtype)
    previous = torch.randint(0, 2 * vocab, (requests,))
    found = cpu.markov_logits(base, w1, w2, previous)
    torch.testing.assert_close(found, torch_ops.markov_logits(base, w1, w2, previous), rtol=1e-5, atol=1e-4)
    assert not torch.equal(found, base.float())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "threads"), [(6, 1), (1031, 1), (9000, 3)])
def test_rejection(cpu: CpuOps, vocab: int, threads: int, kind: str) -> None:
    torch.set_num_threads(threads)
    case = rejection_case(kind, vocab, torch.device("cpu"))
    found, expected = cpu.accept(*case), torch_ops.accept(*case)
    assert [t.tolist() for t in found] == [t.tolist() for t in expected]
    if kind != "p is q":
        assert expected[0].any()
