"""Long contexts: windows, chunks, the last position of the model, and acceptance by length."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark_ray.core.types import Request
from dspark_ray.engine.context_watch import FIRST_BAND, JUDGED_STEPS, RETRY_STEPS, ContextWatch
from dspark_ray.engine.engine import Engine
from dspark_ray.models.targets.decoder import Decoder
from tests import tiny_engine as tiny
from tests.reference import dense_logits
from tests.tiny_engine import collect, request, run, tiny_decoder, tiny_drafter_dir, tiny_engine

VOCAB = 24
MODES = ("fixed", "threshold", "algorithm1", "adaptive")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drafter_dir(tmp_path_factory.mktemp("drafter"), VOCAB, draft_vocab=None)


def requests(max_tokens: int = 24) -> list[Request]:
    prompts = [[(5 * i + 3 * j) % VOCAB for j in range(9 + 13 * i)] for i in range(5)]
    return [
        request(str(i), prompt, temperature=0.0, max_tokens=max_tokens) for i, prompt in enumerate(prompts)
    ]


def windowed(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Decoder:
    whole = tiny.decoder_config
    monkeypatch.setattr(tiny, "decoder_config", lambda vocab: replace(whole(vocab), windows=(7, None, 12)))
    return tiny_decoder(VOCAB, **fields)


@pytest.mark.parametrize("mode", ["off", "fixed", "adaptive"])
def test_windows_hold_in_chunks_and_under_speculation(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    whole = tiny_decoder(VOCAB)
    target = windowed(monkeypatch)
    engine = tiny_engine(
        None if mode == "off" else checkpoint,
        vocab_size=VOCAB,
        target=target,
        speculation={"mode": mode},
        engine={"max_step_rows": 16, "max_running": 8},
    )
    texts = run(engine, requests())
    for item in requests():
        text = (*item.prompt_token_ids, *texts[item.request_id])
        best = dense_logits(target, text).argmax(-1).tolist()
        assert texts[item.request_id] == best[len(item.prompt_token_ids) - 1 : -1]
    plain = {"mode": "off"}
    unlimited = run(tiny_engine(None, vocab_size=VOCAB, target=whole, speculation=plain), requests())
    assert texts != unlimited  # the windows matter


def test_a_bf16_row_is_the_same_in_one_call_and_behind_a_window(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Short contexts go through the compiled stack, which knows no windows; longer ones layer by layer."""
    tiny.skip_without_invariant_kernels()
    monkeypatch.setattr(tiny, "HEAD_DIM", 32)
    target = windowed(monkeypatch, dtype=torch.bfloat16)
    checkpoint = tiny_drafter_dir(tmp_path / "drafter", VOCAB, draft_vocab=None)
    plain = {"mode": "off"}
    alone = tiny_engine(None, vocab_size=VOCAB, target=target, engine={"max_running": 1}, speculation=plain)
    drafted = tiny_engine(checkpoint, vocab_size=VOCAB, target=target, speculation={"mode": "adaptive"})
    short = request("short", [3], temperature=0.0, max_tokens=4)
    assert run(drafted, [short, *requests()]) == run(alone, [short, *requests()])


@pytest.mark.parametrize("mode", MODES)
def test_requests_end_exactly_at_the_models_limit(checkpoint: Path, mode: str) -> None:
    """Whatever is drafted there: the last position is used, and none behind it."""
    items = [
        request(
            str(length), [(7 * i) % VOCAB for i in range(length)], temperature=0.0, max_tokens=64 - length
        )
        for length in (1, 40, 59, 60, 61, 62, 63)
    ]
    sections: dict[str, Any] = {"model": {"max_model_len": 64}, "engine": {"kv_num_blocks": 128}}
    expected = run(
        tiny_engine(None, vocab_size=VOCAB, speculation={"mode": "off"}, **sections),
        items,
    )
    engine = tiny_engine(
        checkpoint, vocab_size=VOCAB, speculation={"mode": mode, "threshold": 0.2}, **sections
    )
    texts: dict[str, list[int]] = {item.request_id: [] for item in items}
    for item in items:
        engine.add_request(item)
    while engine.has_work():
        collect(engine.step(), texts)
        assert all(sequence.num_computed < 64 for sequence in engine.admission.running)
    assert texts == expected
    assert [len(text) for text in texts.values()] == [63, 24, 5, 4, 3, 2, 1]


def watched(
    accepted: float, *, verify_ms: float, steps: int, first: int = 0, claimed: float = 0.9
) -> ContextWatch:
    """Ten requests a step, four tokens verified of each; plain decoding makes a token a millisecond."""
    watch, rng = ContextWatch(4), np.random.default_rng(0)
    for _ in range(steps):
        for _ in range(10):
            watch.note(first + 1, min(4, watch.cap(first + 1)), int(rng.random() < accepted), claimed)
        watch.end_step(10.0, verify_ms, 0.5)
    return watch


def test_speculation_that_pays_keeps_its_cap() -> None:
    watch = watched(0.9, verify_ms=4.0, steps=200)
    assert watch.cap(1) == 4
    (band,) = watch.bands()
    assert (band.first_token, band.cap) == (0, 4)
    assert band.tau == pytest.approx(1.9, abs=0.05)


def test_the_cap_falls_where_it_does_not_and_only_there() -> None:
    watch = watched(0.1, verify_ms=20.0, steps=90, first=3 * FIRST_BAND)
    assert watch.cap(3 * FIRST_BAND) == 0
    assert watch.cap(2 * FIRST_BAND) == 0  # the same band
    assert watch.cap(FIRST_BAND) == watch.cap(4 * FIRST_BAND) == 4
    for _ in range(RETRY_STEPS):
        watch.note(3 * FIRST_BAND, 0, 0, 0.0)
    assert watch.cap(3 * FIRST_BAND) >= 1  # it is tried again


def test_what_is_dear_as_claimed_is_the_budgets_business() -> None:
    """At a high load no verification pays; the budget knows, and a cap would outlast the load."""
    assert watched(0.1, verify_ms=20.0, steps=200, claimed=0.11).cap(1) == 4


def test_a_few_bad_drafts_lower_nothing() -> None:
    assert watched(0.0, verify_ms=20.0, steps=JUDGED_STEPS // 10 - 1).cap(1) == 4


def test_unknown_costs_judge_nothing() -> None:
    watch = ContextWatch(4)
    for _ in range(10 * JUDGED_STEPS):
        watch.note(1, 4, 0, 2.0)
        watch.end_step(0.0, 0.0, 0.0)
    assert watch.cap(1) == 4


def test_a_cap_of_zero_stops_drafting(checkpoint: Path) -> None:
    engine: Engine = tiny_engine(checkpoint, vocab_size=VOCAB, speculation={"mode": "adaptive"})
    assert engine.context_watch is not None
    expected = run(tiny_engine(None, vocab_size=VOCAB, speculation={"mode": "off"}), requests())
    for _ in range(90):
        for _ in range(10):
            engine.context_watch.note(1, 4, 0, 2.0)
        engine.context_watch.end_step(1.0, 100.0, 1.0)
    assert run(engine, requests()) == expected
    assert engine.counters.drafted_tokens == 0
    assert engine.stats().context_bands[0].cap == 0
