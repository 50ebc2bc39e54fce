"""The engine on a device that is not the CPU: same texts, and nothing of a step is left on the wrong one."""

import pytest
import torch

from dspark_ray.core.errors import ConfigError
from dspark_ray.engine.device import choose_device
from dspark_ray.engine.scoring import teacher_forced_logits
from tests.far_device import far_device
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


def test_cuda_without_a_gpu_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        choose_device("cuda")
