"""Acceptance as it runs on a GPU against that of the host: the same verdicts, in any mixture of requests.

Its law is tested by tests/contract/test_engine_law.py and test_constrained_law.py, which run both.
"""

from typing import Any

import numpy as np
import pytest
import torch

from dspark_ray.core.types import Request, SamplingParams
from dspark_ray.engine import device_acceptance
from dspark_ray.engine.acceptance import VerifyRequest, verify
from dspark_ray.engine.device_acceptance import acceptor_for, verify_on_cpu, verify_on_device
from dspark_ray.models.noise import shared_noise
from dspark_ray.models.token_rules import token_rules
from tests.far_device import FAR

VOCAB = 37
GREEDY: dict[str, Any] = {"temperature": 0.0}
NOISY: dict[str, Any] = {"temperature": 0.9, "seed": 5, "top_k": 9, "top_p": 0.9}
DRAWN: dict[str, Any] = {"temperature": 1.1, "min_p": 0.01}
RULED: dict[str, Any] = {"temperature": 0.0, "logit_bias": ((3, 4.0),)}
RULED_NOISY: dict[str, Any] = {**NOISY, "bad_words": ((5,),)}
VOCAB_MAPS = {"whole": None, "reduced": torch.arange(1, VOCAB, 2)}


def make_requests(
    kinds: list[dict[str, Any]], vocab_map: torch.Tensor | None, *, drawn: bool = True
) -> tuple[torch.Tensor, list[VerifyRequest]]:
    """Logits [M, V] and requests with 0 to 6 drafted tokens, many of which the target would have chosen."""
    rng = np.random.default_rng(7)
    generator = torch.Generator().manual_seed(3)
    requests, rows = [], 0
    width = VOCAB if vocab_map is None else len(vocab_map)
    lengths = [int(rng.integers(0, 7)) for _ in kinds]
    logits = 3 * torch.randn(sum(lengths) + len(kinds), VOCAB, generator=generator)
    for index, (kind, length) in enumerate(zip(kinds, lengths, strict=True)):
        sampling = SamplingParams(**kind)
        request = Request(f"r{index}", (1, index), sampling)
        own = logits[rows : rows + length]
        own = own if vocab_map is None else own[:, vocab_map]
        chosen = own.argmax(-1)
        strange = torch.rand(length, generator=generator) < 0.2
        chosen[strange] = torch.randint(width, (int(strange.sum()),), generator=generator)
        noise = shared_noise(request)
        requests.append(
            VerifyRequest(
                first_row=rows,
                draft_tokens=(chosen if vocab_map is None else vocab_map[chosen]).tolist(),
                draft_probs=torch.softmax(own + torch.randn(own.shape, generator=generator), -1)
                if drawn and sampling.rule.value == "rejection"
                else None,
                sampling=sampling,
                rng=np.random.Generator(np.random.Philox(index)),
                adjuster=token_rules(VOCAB, [])(request),
                noise_keys=None if noise is None else noise.keys(0, length + 1),
            )
        )
        rows += length + 1
    return logits, requests


@pytest.mark.parametrize("vocabulary", VOCAB_MAPS)
@pytest.mark.parametrize(
    "kinds", [[GREEDY], [NOISY] * 5, [GREEDY, NOISY, RULED, GREEDY, RULED_NOISY, NOISY] * 3, [RULED]]
)
def test_greedy_and_seeded_requests_get_the_same_verdicts(kinds, vocabulary):
    logits, requests = make_requests(kinds, VOCAB_MAPS[vocabulary])
    expected = verify(logits, requests, VOCAB_MAPS[vocabulary])
    assert verify_on_device(logits, requests, VOCAB_MAPS[vocabulary]) == expected
    assert len(kinds) < 3 or sum(v.num_accepted for v in expected) > 0


@pytest.mark.parametrize("vocabulary", VOCAB_MAPS)
@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("kinds", [[DRAWN], [DRAWN] * 20, [DRAWN, GREEDY, RULED, DRAWN, NOISY] * 4])
def test_drawn_requests_have_as_many_tokens_accepted(kinds, drawn, vocabulary):
    """Of the same random numbers; what comes after them is drawn in another way."""
    counts = []
    for judge in (verify, verify_on_device):
        logits, requests = make_requests(kinds, VOCAB_MAPS[vocabulary], drawn=drawn)
        verdicts = judge(logits, requests, VOCAB_MAPS[vocabulary])
        counts.append([v.num_accepted for v in verdicts])
        assert all(0 <= v.next_token < VOCAB for v in verdicts)
    assert counts[0] == counts[1]
    lengths = [len(r.draft_tokens) for r in requests]
    assert len(kinds) == 1 or 0 < sum(counts[0]) < sum(lengths)


def test_some_drafts_have_no_distribution():
    """As prompt look-up's beside those of a drafter that is tried on a share of the requests."""
    counts = []
    for judge in (verify, verify_on_device):
        logits, requests = make_requests([DRAWN] * 20, None)
        for index in range(0, 20, 3):
            object.__setattr__(requests[index], "draft_probs", None)
        counts.append([v.num_accepted for v in judge(logits, requests, None)])
    assert counts[0] == counts[1]


def test_what_was_decided_comes_to_the_host_once(monkeypatch):
    reads, read = [], device_acceptance.to_host
    monkeypatch.setattr(device_acceptance, "to_host", lambda x: (reads.append(x.shape), read(x))[1])
    logits, requests = make_requests([GREEDY, NOISY, DRAWN, RULED, NOISY, DRAWN], None)
    verify_on_device(logits, requests, None)
    assert reads == [(2, 5)]  # counts and tokens of all but the one with rules


def test_who_verifies():
    assert acceptor_for(torch.device("cpu")) is verify_on_cpu
    assert acceptor_for(FAR) is verify_on_device
