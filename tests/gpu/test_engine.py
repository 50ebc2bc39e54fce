"""The native engine on a GPU: greedy and seeded texts are the CPU's, with CUDA graphs and without."""

import pytest
import torch

from dspark_ray.engine.engine import Engine
from dspark_ray.engine.graphs import GraphedTarget
from dspark_ray.models import transfer
from dspark_ray.models.graphs import CudaCapturer
from tests.tiny_engine import request, run, tiny_decoder, tiny_drafter_dir, tiny_engine

VOCAB = 29


RULES = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 4, "top_p": 0.9})
MIXED = (*RULES, {"temperature": 0.9, "top_k": 7, "min_p": 0.01})


def requests(rules=RULES) -> list:
    return [
        request(f"r{i}", [1 + i, 2, 3 * i % VOCAB], max_tokens=16, **rules[i % len(rules)]) for i in range(6)
    ]


def engine_on(device: str, checkpoint, mode: str, ahead: str = "auto") -> Engine:
    return tiny_engine(
        checkpoint,
        vocab_size=VOCAB,
        target=tiny_decoder(VOCAB, sharpness=3.0, device=torch.device(device)),
        speculation={"mode": mode},
        engine={"max_running": 4, "ahead": ahead},
    )


@pytest.mark.parametrize("mode", ["off", "fixed", "adaptive"])
def test_texts_are_those_of_the_cpu(tmp_path, mode):
    checkpoint = tiny_drafter_dir(tmp_path, VOCAB, draft_vocab=None)
    expected = run(engine_on("cpu", checkpoint, mode), requests())
    for prepare in (lambda engine: engine, captured):
        for ahead in ("on", "off"):
            engine = prepare(engine_on("cuda", checkpoint, mode, ahead))
            assert run(engine, requests()) == expected
            assert ahead == "off" or engine.ahead.num_launched >= engine.counters.target_steps


def captured(engine: Engine) -> Engine:
    """With graphs of all passes."""
    capturer = CudaCapturer()
    engine.graphs = GraphedTarget(engine.config, engine.target, engine.kv, capturer)
    engine.graphs.capture_all(engine.drafter.taps if engine.drafter else ())
    if engine.drafter is not None:
        engine.drafter.use_graphs(capturer, engine.config.engine.max_running)
        engine.drafter.capture_all()
    return engine


@pytest.mark.parametrize(("ahead", "most"), [("on", 1), ("off", 2)])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("draft_vocab", [None, range(1, VOCAB, 2)])
def test_a_step_waits_for_its_copies_and_for_nothing_else(
    tmp_path, monkeypatch, draft_vocab, graphs, ahead, most
):
    """CUDA refuses every other wait of the host for the device."""
    checkpoint = tiny_drafter_dir(tmp_path, VOCAB, draft_vocab=draft_vocab)
    engine = engine_on("cuda", checkpoint, "adaptive", ahead)
    if graphs:
        captured(engine)
    run(engine, requests(MIXED))  # kernels are compiled, libraries set up
    copies, wait = [], transfer.HostCopy.wait

    def noted(copy: transfer.HostCopy) -> torch.Tensor:
        copies.append(copy)
        return wait(copy)

    monkeypatch.setattr(transfer.HostCopy, "wait", noted)
    for item in requests(MIXED):
        engine.add_request(item)
    torch.cuda.set_sync_debug_mode("error")
    try:
        while engine.has_work():
            copies.clear()
            engine.step()
            assert len(copies) <= most
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_every_rule_runs(tmp_path):
    engine = engine_on("cuda", tiny_drafter_dir(tmp_path, VOCAB, draft_vocab=range(1, VOCAB, 2)), "adaptive")
    texts = run(
        engine,
        [
            request("sampled", [1, 2], temperature=0.9, top_k=5, top_p=0.9, max_tokens=12),
            request("seeded", [1, 2], temperature=1.0, seed=2, max_tokens=12),
            request("ruled", [3], temperature=0.0, bad_words=((5,),), logprobs=2, max_tokens=12),
        ],
    )
    assert {len(tokens) for tokens in texts.values()} == {12}
    assert 5 not in texts["ruled"]
