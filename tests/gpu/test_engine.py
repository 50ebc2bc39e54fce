"""The native engine on a GPU: greedy and seeded texts are the CPU's, with CUDA graphs and without."""

import pytest
import torch

from dspark_ray.engine import device_acceptance
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


def engine_on(device: str, checkpoint, mode: str) -> Engine:
    target = tiny_decoder(VOCAB, sharpness=3.0, device=torch.device(device))
    return tiny_engine(
        checkpoint, vocab_size=VOCAB, target=target, speculation={"mode": mode}, engine={"max_running": 4}
    )


@pytest.mark.parametrize("mode", ["off", "fixed", "adaptive"])
def test_texts_are_those_of_the_cpu(tmp_path, mode):
    checkpoint = tiny_drafter_dir(tmp_path, VOCAB, draft_vocab=None)
    expected = run(engine_on("cpu", checkpoint, mode), requests())
    assert run(engine_on("cuda", checkpoint, mode), requests()) == expected
    assert run(captured(engine_on("cuda", checkpoint, mode)), requests()) == expected


def captured(engine: Engine) -> Engine:
    """With graphs of all passes."""
    capturer = CudaCapturer()
    engine.graphs = GraphedTarget(engine.config, engine.target, engine.kv, capturer)
    engine.graphs.capture_all(engine.drafter.taps if engine.drafter else ())
    if engine.drafter is not None:
        engine.drafter.use_graphs(capturer, engine.config.engine.max_running)
        engine.drafter.capture_all()
    return engine


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("draft_vocab", [None, range(1, VOCAB, 2)])
def test_a_step_waits_for_two_copies_at_most(tmp_path, monkeypatch, draft_vocab, graphs):
    """CUDA refuses every other wait of the host for the device."""
    engine = engine_on("cuda", tiny_drafter_dir(tmp_path, VOCAB, draft_vocab=draft_vocab), "adaptive")
    if graphs:
        captured(engine)
    run(engine, requests(MIXED))  # kernels are compiled, libraries set up
    copies, to_host = [], transfer.to_host

    def noted(values: torch.Tensor) -> torch.Tensor:
        copies.append(values.shape)
        return to_host(values)

    monkeypatch.setattr(transfer, "to_host", noted)
    monkeypatch.setattr(device_acceptance, "to_host", noted)
    for item in requests(MIXED):
        engine.add_request(item)
    torch.cuda.set_sync_debug_mode("error")
    try:
        while engine.has_work():
            copies.clear()
            engine.step()
            assert len(copies) <= 2
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
