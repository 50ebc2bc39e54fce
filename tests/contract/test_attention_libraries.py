"""FlashAttention and FlashInfer as this project calls them, against its own reference; the libraries are
stand-ins that read the documented arguments (tests/attention_fakes.py)."""

import itertools
import sys
from types import ModuleType

import pytest
import torch
from dspark_kernels import torch_ops
from dspark_kernels.attention import PagedBatch
from dspark_kernels.attention_libraries import (
    LIBRARIES,
    AttentionShape,
    LibraryError,
    LibraryMissingError,
    load_library,
    paged,
)

from tests.attention_fakes import fake_flash_attn, fake_flash_attn_3, fake_flashinfer, installed

FAKES = {
    "flash_attn": ("flash_attn", fake_flash_attn),
    "flash_attn_3": ("flash_attn_interface", fake_flash_attn_3),
    "flashinfer": ("flashinfer", fake_flashinfer),
}
SCALE = 0.3


def with_fake(name: str) -> dict[str, ModuleType]:
    module, make = FAKES[name]
    return {module: make()}


def make_case(
    counts: list[int], contexts: list[int], block_size: int, seed: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedBatch]:
    """Rows, a cache whose blocks lie in random order, with rows that nobody wrote full of NaN."""
    torch.manual_seed(seed)
    blocks = [-(-length // block_size) for length in contexts]
    order = torch.randperm(sum(blocks) + 2).int()
    tables = torch.full((len(counts), max(blocks) + 1), int(order[-1]), dtype=torch.int32)
    taken = 0
    cache = torch.full((2, len(order) * block_size, 2, 16), float("nan"), dtype=dtype)
    for r, (count, length) in enumerate(zip(blocks, contexts, strict=True)):
        tables[r, :count] = order[taken : taken + count]
        taken += count
        slots = tables[r].long().repeat_interleave(block_size) * block_size
        slots = (slots + torch.arange(block_size).repeat(tables.shape[1]))[:length]
        cache[:, slots] = torch.randn(2, length, 2, 16).to(dtype)
    batch = PagedBatch(
        query_start=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
        kv_len=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables,
        block_size=block_size,
        max_query=max(counts),
        max_kv=max(contexts),
    )
    return torch.randn(sum(counts), 4, 16).to(dtype), cache[0], cache[1], batch


def reference(q, k, v, batch, window=None, soft_cap=None):
    """In fp32, over zeros where nobody wrote."""
    k, v = k.float().nan_to_num(), v.float().nan_to_num()
    return torch_ops.paged_attention(q.float(), k, v, batch, SCALE, window, soft_cap)


def assert_close(found, expected):
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)


RAGGED = {
    "one row": ([1], [1]),
    "rows of one": ([1, 1, 1], [5, 16, 33]),
    "verification": ([1, 4, 2, 8], [5, 40, 17, 16]),
    "a prompt among them": ([1, 3, 17], [9, 31, 33]),
    "prompts from their beginning": ([7, 16], [7, 16]),
}


@pytest.mark.parametrize("shape", RAGGED)
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (1, None), (7, None), (None, 2.0), (12, 2.0)])
@pytest.mark.parametrize("name", LIBRARIES)
def test_it_gives_what_the_reference_gives(name, shape, window, soft_cap):
    counts, contexts = RAGGED[shape]
    block_size = 256 if name == "flash_attn" else 16
    q, k, v, batch = make_case(counts, contexts, block_size, len(shape))
    with installed(**with_fake(name)):
        found = load_library(name)(q, k, v, batch, SCALE, window, soft_cap)
    assert_close(found, reference(q, k, v, batch, window, soft_cap))


@pytest.mark.parametrize("name", LIBRARIES)
def test_random_ragged_batches(name):
    generator = torch.Generator().manual_seed(3)
    with installed(**with_fake(name)):
        library = load_library(name)
        for seed in range(6):
            sizes = torch.randint(
                1, 9, (int(torch.randint(1, 6, (), generator=generator)),), generator=generator
            )
            counts = sizes.tolist()
            before = torch.randint(0, 50, (len(counts),), generator=generator)
            block_size = 256 if name == "flash_attn" else (1, 4, 16, 64)[seed % 4]
            q, k, v, batch = make_case(counts, (sizes + before).tolist(), block_size, seed)
            window = (None, 3, 20)[seed % 3]
            assert_close(library(q, k, v, batch, SCALE, window), reference(q, k, v, batch, window))


def test_the_cache_is_not_copied():
    """Also where keys and values of a token lie side by side: pages are views of it."""
    both = torch.randn(64, 2, 2, 16)
    pages = paged(both[:, 1], 16)
    assert pages.shape == (4, 16, 2, 16)
    assert pages.untyped_storage().data_ptr() == both.untyped_storage().data_ptr()
    assert torch.equal(pages[2, 3], both[35, 1])


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_3"])
def test_lengths_of_the_device_are_read_in_every_call(name):
    """A captured call replays with what the buffers hold: pad rows, too, requests of one row and key."""
    block_size = 256
    q, k, v, batch = make_case([2, 3, 1], [9, 20, 1], block_size, 0)
    with installed(**with_fake(name)):
        library = load_library(name)
        assert library.capturable
        first = library(q, k, v, batch, SCALE)
        assert_close(first, reference(q, k, v, batch))
        batch.query_start.copy_(torch.tensor([0, 1, 5, 6]))
        batch.kv_len.copy_(torch.tensor([7, 19, 1]))
        wide = PagedBatch(batch.query_start, batch.kv_len, batch.block_tables, block_size, 4, 20)
        second = library(q, k, v, wide, SCALE)
        assert_close(second, reference(q, k, v, wide))
        assert not torch.allclose(first, second)


def test_flashinfer_plans_once_a_batch_and_window():
    module = fake_flashinfer()
    wrapper = module.BatchPrefillWithPagedKVCacheWrapper
    q, k, v, batch = make_case([1, 4], [5, 40], 16, 0)
    other = make_case([1, 4], [9, 33], 16, 1)
    with installed(flashinfer=module):
        library = load_library("flashinfer")
        assert not library.capturable
        for layer in range(3):  # of one pass: the second has another window, all have scales of their own
            window, scale = (None, 8, None)[layer], SCALE * (1 + layer)
            found = library(q, k, v, batch, scale, window)
            expected = reference(q * (1 + layer), k, v, batch, window)
            torch.testing.assert_close(found.float(), expected, rtol=0.03, atol=0.03)
        assert wrapper.num_plans == 2
        assert_close(library(*other, SCALE), reference(*other))  # the next step
        assert wrapper.num_plans == 3


def test_flashinfer_reads_float8_keys():
    q, k, v, batch = make_case([1, 4], [5, 40], 16, 0)
    eight = [cache.float().to(torch.float8_e4m3fn) for cache in (k, v)]
    with installed(flashinfer=fake_flashinfer()):
        found = load_library("flashinfer")(q, *eight, batch, SCALE)
    assert_close(found, reference(q, *eight, batch))


def test_flashinfer_needs_lengths_on_the_host():
    _, _, _, batch = make_case([1], [5], 16, 0)
    placed = batch.to(torch.device("meta"))
    assert placed.on_host is batch
    with installed(flashinfer=fake_flashinfer()):
        library = load_library("flashinfer")
        lost = PagedBatch(placed.query_start, placed.kv_len, placed.block_tables, 16, 1, 5)
        cache = torch.zeros(16, 2, 16, device="meta")
        with pytest.raises(AssertionError, match="on the host"):
            library(torch.zeros(1, 4, 16, device="meta"), cache, cache, lost, SCALE)


def shape(**changed) -> AttentionShape:
    plain = {
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "dtype": torch.bfloat16,
        "kv_dtype": torch.bfloat16,
        "block_size": 256,
        "windows": (None,),
        "capability": (9, 0),
    }
    return AttentionShape(**plain | changed)


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({}, set()),
        ({"block_size": 16}, {"flash_attn"}),
        ({"head_dim": 80}, {"flashinfer"}),
        ({"head_dim": 100}, set(LIBRARIES)),
        ({"head_dim": 512}, set(LIBRARIES)),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, set(LIBRARIES)),
        ({"kv_dtype": torch.float8_e4m3fn}, {"flash_attn", "flash_attn_3"}),
        ({"capability": (8, 0)}, {"flash_attn_3"}),
        ({"capability": (10, 0)}, {"flash_attn_3"}),
        ({"capability": (7, 5)}, set(LIBRARIES)),
    ],
)
def test_what_a_library_cannot_express_it_refuses(changed, refused):
    with installed(**{name: module for one in FAKES for name, module in with_fake(one).items()}):
        found = {name: load_library(name).refusal(shape(**changed)) for name in LIBRARIES}
    assert {name for name, reason in found.items() if reason is not None} == refused


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_is_not_there(name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with installed(), pytest.raises(LibraryMissingError, match="is not installed"):
        load_library(name)


def test_a_library_that_does_not_import(tmp_path, monkeypatch):
    (tmp_path / "flash_attn.py").write_text("raise OSError('undefined symbol: _ZN3c10')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with installed(), pytest.raises(LibraryError, match="import flash_attn: OSError: undefined symbol"):
        load_library("flash_attn")


@pytest.mark.parametrize("name", LIBRARIES)
def test_another_versions_interface(name):
    module = ModuleType(FAKES[name][0])
    with installed(**{module.__name__: module}), pytest.raises(LibraryError, match=r"missing|has no"):
        load_library(name)
    module.flash_attn_varlen_func = lambda q, k, v, causal=False: q  # of before there were pages
    module.flash_attn_with_kvcache = lambda q, k_cache, v_cache, causal=False: q
    module.BatchPrefillWithPagedKVCacheWrapper = type("Wrapper", (), {"plan": lambda self: None})
    with installed(**{module.__name__: module}), pytest.raises(LibraryError, match="another version"):
        load_library(name)


def test_nothing_of_a_stand_in_stays():
    assert not {"flash_attn", "flash_attn_interface", "flashinfer"} & sys.modules.keys()
