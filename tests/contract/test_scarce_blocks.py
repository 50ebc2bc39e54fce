"""Losslessness when KV blocks are scarce: who gets the last block must not depend on what was drafted.

Two requests fill a pool of four blocks. B's anchor and first draft token fit in its last block, its second
does not, and the score of the second depends on the value of the first (as a confidence head's may). If
lengths decided who takes or loses blocks, B's "good" first tokens would be preempted and drawn anew.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from dspark_ray.core.clock import ManualClock
from dspark_ray.engine.engine import Engine
from dspark_ray.models.drafters.base import ContextRows, DraftBlock, DraftRequest, Outcome
from dspark_ray.models.targets.decoder import Decoder
from tests.reference import dense_logits
from tests.tiny_engine import STEEP_TABLE, collect, request, tiny_config, tiny_decoder

PROMPTS = {"A": (0, 1, 0, 1), "B": (1, 0, 0, 1, 0, 1)}
NUM_RUNS = 1500


class TellTaleDrafter:
    """Uniform tokens of a vocabulary of two; c_2 is .9 after a 0 and 0 after a 1."""

    num_draft_tokens = 2
    taps: tuple[int, ...] = ()
    vocab_map = None
    context_digests: tuple[str, ...] = ()

    def commit(self, rows: ContextRows) -> None: ...

    def observe(self, outcomes: Sequence[Outcome]) -> None: ...

    def wants_full_verification(self) -> bool:
        return False

    def describe(self) -> str:
        return "tell-tale"

    def propose(self, requests: Sequence[DraftRequest]) -> DraftBlock:
        width = len(requests[0].uniforms)
        tokens = [[int(u >= 0.5) for u in r.uniforms] for r in requests]
        scores = [[0.9, 0.9 if drawn[0] == 0 else 0.0][:width] for drawn in tokens]
        uniform = torch.full((width, 2), 0.5)
        return DraftBlock(tokens, np.array(scores, dtype=np.float32), [uniform] * len(requests))


def scarce_engine(target: Decoder, mode: str) -> Engine:
    config = tiny_config(
        model={"max_model_len": 16},
        engine={"kv_num_blocks": 4, "kv_block_size": 4, "prefix_cache": False},
        speculation={"num_draft_tokens": 2, "mode": mode, "threshold": 0.5},
    )
    return Engine(config, target, TellTaleDrafter(), STEEP_TABLE, ManualClock())


@pytest.mark.parametrize("mode", ["fixed", "threshold", "algorithm1", "adaptive"])
def test_the_second_token_of_the_latest_arrival_keeps_its_law(mode: str) -> None:
    target = tiny_decoder(2, seed=3, sharpness=0.25)
    owed = {
        first: float(
            torch.softmax(torch.from_numpy(dense_logits(target, (*PROMPTS["B"], first))[-1]).double(), -1)[0]
        )
        for first in (0, 1)
    }
    observed = expected = variance = 0.0
    verified = 0
    for run in range(NUM_RUNS):
        engine = scarce_engine(target, mode)
        rejection = {"temperature": 1.0, "shared_noise": False}
        engine.add_request(request("A", PROMPTS["A"], max_tokens=8, seed=10**6 + run, **rejection))
        engine.add_request(request("B", PROMPTS["B"], max_tokens=6, seed=run, **rejection))
        texts: dict[str, list[int]] = {"A": [], "B": []}
        while len(texts["B"]) < 2:
            collect(engine.step(), texts)
        first, second = texts["B"][:2]
        observed += second == 0
        expected += owed[first]
        variance += owed[first] * (1 - owed[first])
        verified += engine.counters.verified_tokens
    assert verified > 0
    assert abs(observed - expected) < 4 * variance**0.5
