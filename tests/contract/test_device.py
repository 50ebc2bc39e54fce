"""The engine on a device that is not the CPU: same texts, and nothing of a step is left on the wrong one."""

import pytest
import torch

from dspark_ray.core.errors import ConfigError
from dspark_ray.engine.device import choose_device
from dspark_ray.engine.scoring import teacher_forced_logits
from tests.drafter_families import FAMILIES, family_config, family_dir
from tests.far_device import far_device, host_waits
from tests.tiny_engine import request, run, tiny_decoder, tiny_drafter_dir, tiny_engine

VOCAB = 23
REQUESTS = [
    request("greedy", [1, 2, 3], temperature=0.0, max_tokens=12),
    request("sampled", [4, 5], temperature=0.9, top_k=9, top_p=0.9, min_p=0.01, max_tokens=12),
    request("seeded", [6, 7, 8, 9], temperature=1.0, seed=3, max_tokens=12),
    request("ruled", [3, 3], temperature=0.0, frequency_penalty=0.7, bad_words=((5,),), max_tokens=12),
    request("drawn and ruled", [2], temperature=1.0, logit_bias=((4, 1.5),), logprobs=3, max_tokens=12),
    request("with its prompt's", [9, 1, 4, 4], temperature=0.0, prompt_logprobs=2, max_tokens=4),
]
DRAWN = ("sampled", "drawn and ruled")  # anew each time


def texts(device: torch.device | None, checkpoint, **sections) -> dict[str, list[int]]:
    target = tiny_decoder(VOCAB, sharpness=3.0, device=device or torch.device("cpu"))
    engine = tiny_engine(checkpoint, vocab_size=VOCAB, target=target, **sections)
    assert device is None or engine.kv.k.device == device
    found = run(engine, REQUESTS)
    assert all(len(tokens) == 12 for name, tokens in found.items() if name in DRAWN)
    return {name: tokens for name, tokens in found.items() if name not in DRAWN}


@pytest.mark.parametrize("draft_vocab", [None, range(1, VOCAB, 2)])
@pytest.mark.parametrize("mode", ["off", "fixed", "adaptive"])
def test_a_far_device_gives_the_same_texts(tmp_path, mode, draft_vocab):
    checkpoint = tiny_drafter_dir(tmp_path, VOCAB, draft_vocab=draft_vocab)
    sections = {"speculation": {"mode": mode}}
    near = texts(None, checkpoint, **sections)
    with far_device() as device:
        assert texts(device, checkpoint, **sections) == near


def test_prompt_lookup_on_a_far_device():
    near = texts(None, None)
    with far_device() as device:
        assert texts(device, None) == near


def test_scoring_on_a_far_device():
    near = teacher_forced_logits(tiny_decoder(VOCAB), [1, 2, 3, 4], 1)
    with far_device() as device:
        far = teacher_forced_logits(tiny_decoder(VOCAB, device=device), [1, 2, 3, 4], 1)
        torch.testing.assert_close(far.cpu(), near)


def test_the_far_device_finds_a_tensor_of_the_cpu():
    with far_device() as device:
        x = torch.zeros(3, device=device)
        with pytest.raises(AssertionError, match="aten::add"):
            x + torch.zeros(3)
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()


QUICK = [  # no rules of the host
    request("greedy", [1, 2, 3], temperature=0.0, max_tokens=6),
    request("sampled", [4, 5], temperature=0.9, top_k=9, top_p=0.9, max_tokens=6),
    request("seeded", [6, 7, 8, 9], temperature=1.0, seed=3, max_tokens=6),
]


def waits_by_step(engine) -> list[list[str]]:
    """Of each step of the quick requests."""
    for item in QUICK:
        engine.add_request(item)
    found = []
    while engine.has_work():
        with host_waits() as waits:
            engine.step()
        found.append(waits)
    return found


@pytest.mark.parametrize(
    ("family", "draft_vocab"),
    [("none", None), ("dspark", None), *((family, tuple(range(1, VOCAB, 2))) for family in FAMILIES)],
)
def test_a_step_waits_for_verdicts_and_for_drafts_and_for_nothing_else(tmp_path, family, draft_vocab):
    """One copy to the host each. With a GPU tests/gpu/test_engine.py asks CUDA itself."""
    sections: dict = {"speculation": {"mode": "off"}}
    checkpoint = None
    if family != "none":
        checkpoint = family_dir(tmp_path, family, VOCAB, draft_vocab)
        named = {"kind": FAMILIES[family].kind, "path": str(checkpoint)}
        size = family_config(family, VOCAB).block_size
        sections = {"speculation": {"mode": "adaptive", "drafter": named, "num_draft_tokens": size}}
    sections["engine"] = {"ahead": "off"}  # tests/contract/test_ahead.py has the steps that wait for less
    with far_device() as device:
        target = tiny_decoder(VOCAB, sharpness=3.0, device=device)
        engine = tiny_engine(checkpoint, vocab_size=VOCAB, target=target, **sections)
        waits = waits_by_step(engine)
    drafts = 0 if family == "none" else 1
    assert {name for step in waits for name in step} == {"aten::to"}  # `transfer.to_host`
    assert max(map(len, waits)) == 1 + drafts
    assert sum(map(len, waits)) <= (1 + drafts) * engine.counters.target_steps


def test_a_wait_that_is_one_too_many_is_found(tmp_path):
    checkpoint = tiny_drafter_dir(tmp_path, VOCAB, draft_vocab=None)
    with far_device() as device:
        target = tiny_decoder(VOCAB, sharpness=3.0, device=device)
        engine = tiny_engine(checkpoint, vocab_size=VOCAB, target=target, engine={"ahead": "off"})
        engine.drafter.heads.chooses_on_device = False  # slot by slot, on the host
        assert max(map(len, waits_by_step(engine))) > 4


def test_what_counts_as_a_wait():
    with far_device() as device:
        x, rows = torch.arange(6.0).to(device), torch.tensor([1, 2])
        there = rows.to(device)
        for harmless in (
            lambda: x + 1,
            lambda: x[there],
            lambda: x[1:3].copy_(torch.zeros(2), non_blocking=True),
            lambda: rows.to(device, non_blocking=True),
            lambda: torch.repeat_interleave(x, 2),
            lambda: torch.repeat_interleave(x[there], there, output_size=3),
        ):
            with host_waits() as waits:
                harmless()
            assert waits == []
        for waiting in (
            x.tolist,
            x.cpu,
            lambda: bool(x.any()),
            lambda: x[0].item(),
            lambda: x[rows],
            lambda: x[[0, 1]],
            lambda: x[x > 2],
            lambda: rows.to(device),
            lambda: x[:2].copy_(torch.zeros(2)),
            lambda: torch.zeros(6).copy_(x),
            lambda: torch.tensor([1.0], device=device),
            lambda: x.nonzero(),
            lambda: torch.repeat_interleave(x[there], there),
        ):
            with host_waits() as waits:
                waiting()
            assert len(waits) == 1, waits


def test_cuda_without_a_gpu_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        choose_device("cuda")
