"""Layers, and a drafter's whole pass, in one compiled call: the bits of the same ops called one by one."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from dspark_kernels.attention import PagedBatch

from dspark_ray.core.types import SamplingParams
from dspark_ray.models.drafters import dspark
from dspark_ray.models.drafters.base import ContextRows, DraftBlock, DrafterContext, DraftRequest
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


def drafter_of(folder: Path, draft_vocab: range | None) -> DSparkDrafter:
    checkpoint = tiny_drafter_dir(folder / "drafter", VOCAB, draft_vocab=draft_vocab)
    return DSparkDrafter(
        DrafterContext(
            path=str(checkpoint),
            target=decoder("none"),
            num_draft_tokens=3,
            num_slots=64 * BLOCK,
            kv_block_size=BLOCK,
            max_positions=256,
            temperatures=None,
            ngram_min=2,
            ngram_max=4,
        )
    )


def drafts(drafter: DSparkDrafter, lengths: Sequence[int], temperature: float, rows: int) -> list[DraftBlock]:
    """In one call and op by op, after `rows` rows of context; what they store is compared here."""
    torch.manual_seed(1)
    at = torch.arange(rows)
    taps = torch.randn(rows, len(drafter.taps) * tiny.HIDDEN, dtype=torch.bfloat16)
    sampling, uniforms = SamplingParams(temperature=temperature), np.array([0.1, 0.9, 0.4])
    requests = [
        DraftRequest([5] * (length - 1) + [length % VOCAB], list(range(32)), sampling, uniforms)
        for length in lengths
    ]
    backbone, blocks, stored = drafter.backbone, [], []
    assert backbone.compiled is not None
    for version in (backbone.compiled, None):
        backbone.compiled = version
        backbone.kv.k.zero_(), backbone.kv.v.zero_()
        drafter.commit(ContextRows(taps, at, at, at))
        blocks.append(drafter.propose(requests))
        stored.append((backbone.kv.k.clone(), backbone.kv.v.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*stored, strict=True))
    assert stored[0][0].abs().sum() > 0
    return blocks


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("lengths", [(40,), (1, 17, 40)])
@pytest.mark.parametrize("draft_vocab", [None, range(1, VOCAB, 2)])
def test_a_drafters_pass(
    tmp_path: Path, threads: int, lengths: tuple[int, ...], draft_vocab: range | None
) -> None:
    was = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        fast, slow = drafts(drafter_of(tmp_path, draft_vocab), lengths, 0.0, 40)
    finally:
        torch.set_num_threads(was)
    assert fast.token_ids == slow.token_ids
    assert fast.confidence_logits == pytest.approx(slow.confidence_logits, abs=1e-5)
    assert fast.confidences == pytest.approx(slow.confidences, abs=1e-5)
    assert len({tuple(row) for row in fast.token_ids}) == len(lengths)


def test_a_drafters_pass_for_sampled_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows of context than wait for a draft."""
    monkeypatch.setattr(dspark, "PENDING_ROWS", 64)
    fast, slow = drafts(drafter_of(tmp_path, range(1, VOCAB, 2)), (1, 17, 90), 1.0, 90)
    assert fast.token_ids == slow.token_ids
    assert np.array_equal(fast.confidences, slow.confidences)
    for a, b in zip(fast.draft_probs, slow.draft_probs, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)
