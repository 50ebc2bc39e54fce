"""The whole engine on Triton's kernels, through the interpreter: the same texts as on the reference.

Finds what single kernels do not show: views that are not contiguous, types that do not meet, shapes of none.
"""

from functools import lru_cache

import pytest
import torch
from dspark_kernels import dispatch, torch_ops

from dspark_ray.engine.graphs import GraphedTarget
from tests.contract.test_graphs import RerunCapturer
from tests.tiny_engine import AHEAD, on_path, request, run, tiny_decoder, tiny_drafter_dir, tiny_engine

pytest.importorskip("triton", reason="Triton is not installed: pip install 'dspark-ray[gpu]'")
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the kernels compiled"),
]

VOCAB = 19
REQUESTS = [
    request("greedy", [1, 2, 3], temperature=0.0, max_tokens=5),
    request("seeded", [6, 7, 8, 9], temperature=1.0, seed=3, top_k=9, top_p=0.9, min_p=0.01, max_tokens=5),
    request("ruled", [3], temperature=0.0, frequency_penalty=0.7, max_tokens=4),
    request("drawn", [5, 2], temperature=1.0, seed=2, shared_noise=False, top_p=0.9, max_tokens=4),
]


@lru_cache
def version(name: str) -> dispatch.Ops:
    return torch_ops if name == "torch" else dispatch._triton_ops()


@pytest.mark.parametrize(
    ("dtype", "draft_vocab", "path"),
    [
        ("float32", None, "host"),
        ("bfloat16", range(1, VOCAB, 2), "device"),
        ("float32", range(1, VOCAB, 2), AHEAD),
    ],
)
def test_texts_are_those_of_the_reference(tmp_path, monkeypatch, dtype, draft_vocab, path):
    checkpoint = tiny_drafter_dir(tmp_path, VOCAB, draft_vocab=draft_vocab)
    texts = {}
    for name in ("torch", "triton"):
        monkeypatch.setattr(dispatch, "cpu_version", lambda name=name: version(name))
        target = tiny_decoder(VOCAB, sharpness=4.0, dtype=getattr(torch, dtype))
        engine = tiny_engine(
            checkpoint,
            vocab_size=VOCAB,
            target=target,
            model={"dtype": dtype},
            engine={"max_running": 4, "kv_num_blocks": 64},
        )
        on_path(path, engine)
        if path != "host" and name == "triton":
            engine.graphs = GraphedTarget(engine.config, target, engine.kv, RerunCapturer())
            engine.graphs.runner.sizes = (8, 20)
        items = [item for item in REQUESTS if path != AHEAD or item.request_id != "ruled"]
        texts[name] = run(engine, items)
        assert path != AHEAD or engine.ahead.num_launched >= engine.counters.target_steps
    assert texts["triton"] == texts["torch"]
