"""In bf16, too, a text does not depend on the batch around it, nor on drafts: every op computes a row alone.

Texts that change with the load are what makes bf16 speculation inexact elsewhere. The compiled kernels sum in
an order that the batch does not decide; oneDNN, their substitute on other CPUs, promises no such thing.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dspark_kernels.linear import Int8Linear, PackedLinear

from dspark_ray.core.errors import ConfigError, RequestError
from dspark_ray.core.types import Request
from dspark_ray.engine.build import build_engine
from dspark_ray.models.targets.decoder import Linear
from tests import tiny_engine as tiny
from tests.tiny import tiny_model_dir
from tests.tiny_engine import (
    request,
    run,
    skip_without_invariant_kernels,
    steep_table,
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
    drafted = tiny_engine(
        checkpoint, vocab_size=VOCAB, target=target, table=steep_table(32), speculation={"mode": mode}
    )
    expected = run(alone, requests())
    assert run(drafted, requests()) == expected
    assert drafted.counters.accepted_tokens > 0
    assert drafted.counters.rejected_tokens > 0
    assert len({tuple(text) for text in expected.values()}) > 12


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 1.3, "seed": 6, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    {"temperature": 0.7, "seed": 7, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("linear", [PackedLinear, Int8Linear])
def test_deterministic_texts_do_not_depend_on_what_else_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linear: Linear
) -> None:
    skip_without_invariant_kernels()
    monkeypatch.setattr(tiny, "HEAD_DIM", 32)
    target = tiny_decoder(VOCAB, dtype=torch.bfloat16, linear=linear)
    assert target.is_batch_invariant
    checkpoint = tiny_drafter_dir(tmp_path / "drafter", VOCAB, draft_vocab=None)
    items = [
        replace(item, sampling=replace(item.sampling, deterministic=True, **SAMPLINGS[i % len(SAMPLINGS)]))
        for i, item in enumerate(requests())
    ]
    plain = {"mode": "off"}
    alone = tiny_engine(None, vocab_size=VOCAB, target=target, engine={"max_running": 1}, speculation=plain)
    chunked = {"max_step_rows": 32, "max_running": 16, "kv_num_blocks": 96}  # and preempted
    drafted = tiny_engine(
        checkpoint, vocab_size=VOCAB, target=target, engine=chunked, speculation={"mode": "adaptive"}
    )
    assert run(drafted, items) == run(alone, items)
    assert drafted.counters.accepted_tokens > 0
    assert drafted.stats().num_preemptions > 0


def test_what_cannot_be_promised_is_refused(tmp_path: Path) -> None:
    item = request("r", [1, 2], temperature=0.0, deterministic=True)
    engine = tiny_engine(None, vocab_size=VOCAB, speculation={"mode": "off"})  # fp32
    with pytest.raises(RequestError, match="bfloat16, and a CPU") as refused:
        engine.add_request(item)
    assert (refused.value.param, refused.value.code) == ("deterministic", "unsupported_parameter")
    assert not engine.has_work()
    config = tiny.tiny_config(engine={"deterministic": True}, speculation={"mode": "off"})
    with pytest.raises(ConfigError, match=r"engine\.deterministic"):
        build_engine(config, model_dir=tiny_model_dir(tmp_path))
