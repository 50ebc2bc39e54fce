"""In bf16, too, a text does not depend on the batch around it, nor on drafts: every op computes a row alone.

Texts that change with the load are what makes bf16 speculation inexact elsewhere. The compiled kernels sum in
an order that the batch does not decide; oneDNN, their substitute on other CPUs, promises no such thing.
"""

from pathlib import Path

import pytest
import torch

from dspark_ray.core.types import Request
from tests import tiny_engine as tiny
from tests.tiny_engine import (
    request,
    run,
    skip_without_invariant_kernels,
    tiny_decoder,
    tiny_drafter_dir,
    tiny_engine,
)

VOCAB = 64


def requests() -> list[Request]:
    """24 prompts of different lengths."""
    prompts = [[(7 * i + 3 * j) % VOCAB for j in range(3 + i)] for i in range(24)]
    return [
        request(str(i), prompt, max_tokens=24, temperature=0.0, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("mode", ["fixed", "adaptive"])
def test_bf16_texts_are_the_same_alone_together_and_drafted(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_invariant_kernels()
    monkeypatch.setattr(tiny, "HEAD_DIM", 32)  # smaller heads go to torch's attention
    target = tiny_decoder(VOCAB, dtype=torch.bfloat16)
    checkpoint = tiny_drafter_dir(tmp_path / "drafter", VOCAB, draft_vocab=None)
    plain = {"mode": "off"}
    alone = tiny_engine(None, vocab_size=VOCAB, target=target, engine={"max_running": 1}, speculation=plain)
    drafted = tiny_engine(checkpoint, vocab_size=VOCAB, target=target, speculation={"mode": mode})
    expected = run(alone, requests())
    assert run(drafted, requests()) == expected
    assert drafted.counters.accepted_tokens > 0
    assert drafted.counters.rejected_tokens > 0
    assert len({tuple(text) for text in expected.values()}) > 12
