"""The native engine on a GPU: greedy texts are the CPU's, with CUDA graphs and without."""

import pytest
import torch

from dspark_ray.engine.engine import Engine
from dspark_ray.engine.graphs import CudaCapturer, GraphedTarget
from tests.tiny_engine import request, run, tiny_decoder, tiny_drafter_dir, tiny_engine

VOCAB = 29


def requests() -> list:
    return [request(f"r{i}", [1 + i, 2, 3 * i % VOCAB], temperature=0.0, max_tokens=16) for i in range(6)]


def engine_on(device: str, checkpoint, mode: str) -> Engine:
    target = tiny_decoder(VOCAB, sharpness=3.0, device=torch.device(device))
    return tiny_engine(
        checkpoint, vocab_size=VOCAB, target=target, speculation={"mode": mode}, engine={"max_running": 4}
    )


@pytest.mark.parametrize("mode", ["off", "fixed", "adaptive"])
def test_greedy_texts_are_those_of_the_cpu(tmp_path, mode):
    checkpoint = tiny_drafter_dir(tmp_path, VOCAB, draft_vocab=None)
    expected = run(engine_on("cpu", checkpoint, mode), requests())
    assert run(engine_on("cuda", checkpoint, mode), requests()) == expected
    engine = engine_on("cuda", checkpoint, mode)
    engine.graphs = GraphedTarget(engine.config, engine.target, engine.kv, CudaCapturer())
    engine.graphs.capture_all(engine.drafter.taps if engine.drafter else ())
    assert run(engine, requests()) == expected


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
