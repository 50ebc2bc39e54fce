"""Layers in one compiled call give the bits of the same layers called op by op."""

from pathlib import Path

import pytest
import torch
from dspark_kernels.attention import PagedBatch

from dspark_ray.core.types import SamplingParams
from dspark_ray.models.drafters.base import ContextRows, DrafterContext, DraftRequest
from dspark_ray.models.drafters.dspark import DSparkDrafter
from dspark_ray.models.targets.decoder import LINEARS, Decoder
from tests import tiny_engine as tiny
from tests.tiny_engine import tiny_decoder, tiny_drafter_dir

VOCAB, BLOCK = 64, 4
QUERY = (1, 3, 9, 1)  # rows of each request
CACHED = (30, 3, 250, 1)  # keys of each, its own rows included


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "HEAD_DIM", 32)  # smaller heads go to torch's attention


def decoder(quantization: str) -> Decoder:
    target = tiny_decoder(VOCAB, dtype=torch.bfloat16, linear=LINEARS[quantization])
    if target._stack is None:
        pytest.skip("this CPU has no compiled bf16 linear")
    return target


def paged_batch() -> tuple[PagedBatch, torch.Tensor, torch.Tensor]:
    """The requests' blocks in scattered places; (batch, positions [N], slots [N])."""
    widest = -(-max(CACHED) // BLOCK)
    tables = torch.randperm(len(CACHED) * widest, dtype=torch.int32).view(len(CACHED), widest)
    positions = [torch.arange(end - rows, end) for rows, end in zip(QUERY, CACHED, strict=True)]
    slots = [tables[r, p // BLOCK].long() * BLOCK + p % BLOCK for r, p in enumerate(positions)]
    starts = torch.tensor([0, *QUERY]).cumsum(0).int()
    batch = PagedBatch(starts, torch.tensor(CACHED).int(), tables, BLOCK, max(QUERY), max(CACHED))
    return batch, torch.cat(positions), torch.cat(slots)


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_target_pass(quantization: str, threads: int) -> None:
    torch.manual_seed(0)
    target = decoder(quantization)
    batch, positions, slots = paged_batch()
    tokens, taps = torch.randint(VOCAB, positions.shape), (1, -1, 2)
    runs = []
    kv = target.new_kv(batch.block_tables.numel() * BLOCK)
    kv.k.normal_(), kv.v.normal_()
    was = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for stack in (target._stack, None):
            target._stack, own = stack, target.new_kv(batch.block_tables.numel() * BLOCK)
            own.k.copy_(kv.k), own.v.copy_(kv.v)
            output = target.forward(tokens, positions, own, slots, batch, taps)
            runs.append((output.hidden, output.taps, own.k, own.v))
    finally:
        torch.set_num_threads(was)
    for fast, slow in zip(*runs, strict=True):
        assert torch.equal(fast, slow)
    assert runs[0][1].shape == (len(tokens), 3 * tiny.HIDDEN)
    assert not torch.equal(runs[0][2], kv.k)  # the rows' keys were written


def test_a_drafters_block(tmp_path: Path) -> None:
    target = decoder("none")
    checkpoint = tiny_drafter_dir(tmp_path / "drafter", VOCAB, draft_vocab=None)
    drafter = DSparkDrafter(
        DrafterContext(
            path=str(checkpoint),
            target=target,
            num_draft_tokens=3,
            num_slots=64 * BLOCK,
            kv_block_size=BLOCK,
            max_positions=256,
            temperatures=None,
            ngram_min=2,
            ngram_max=4,
        )
    )
    torch.manual_seed(1)
    taps = torch.randn(40, len(drafter.taps) * tiny.HIDDEN, dtype=torch.bfloat16)
    drafter.commit(ContextRows(taps, torch.arange(40), torch.arange(40), torch.zeros(40, dtype=torch.int64)))
    requests = [
        DraftRequest([5] * length, list(range(11)), SamplingParams(temperature=0.0), torch.zeros(3).numpy())
        for length in (1, 17, 40)
    ]
    backbone = drafter.backbone
    assert backbone._stack is not None
    fast = backbone.forward(requests, 3)
    backbone._stack = None
    assert torch.equal(fast, backbone.forward(requests, 3))
    assert fast.abs().sum() > 0
