"""The oracle: whatever is asked for and however much is drafted, the text is plain decoding's.

One batch holds a request of every setting. Its texts without a drafter are what every mode must reproduce
at every concurrency, with and without the prefix cache, and under preemption.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dspark_kernels.torch_ops import noisy_argmax

from dspark_ray.core.types import Request
from dspark_ray.engine.engine import Engine
from dspark_ray.models.adjust import Columns
from dspark_ray.models.noise import shared_noise
from dspark_ray.models.sampling import filtered_probs, sampling_rows
from dspark_ray.models.token_rules import token_rules
from tests.oracle_grid import GRID, Conditions, check_texts
from tests.reference import dense_logits
from tests.tiny_engine import request, run, tiny_decoder, tiny_drafter_dir, tiny_engine

VOCAB = 24
EOS = 5
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "presence": {"temperature": 0.0, "presence_penalty": 0.6},
    "frequency": {"temperature": 0.0, "frequency_penalty": 0.3},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.2},
    "rewarded": {"temperature": 0.0, "presence_penalty": -0.5, "frequency_penalty": -0.2},
    "bias": {"temperature": 0.0, "logit_bias": ((2, 1.5), (7, -100.0), (10, 0.5))},
    "bad words": {"temperature": 0.0, "bad_words": ((4,), (2, 6), (12, 3, 12), (0, 0))},
    "allowed": {"temperature": 0.0, "allowed_token_ids": tuple(range(0, VOCAB, 3))},
    "min tokens": {"temperature": 0.0, "min_tokens": 12, "stop_token_ids": (6, 20)},
    "everything": {
        "temperature": 0.0,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "repetition_penalty": 1.1,
        "logit_bias": ((EOS, 2.0), (8, 1.0)),
        "bad_words": ((3,), (8, 8)),
        "min_tokens": 9,
    },
    "seeded": {"temperature": 1.0, "seed": 7},
    "seeded, filtered": {"temperature": 1.5, "seed": 7, "top_p": 0.9, "top_k": 12, "min_p": 0.02},
    "seeded, everything": {
        "temperature": 0.8,
        "seed": -3,
        "choice": 1,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "logit_bias": ((4, 1.0),),
        "bad_words": ((3,), (4, 4)),
        "min_tokens": 7,
        "stop_token_ids": (8,),
    },
}
PER_SETTING = 2
LENGTH = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drafter_dir(tmp_path_factory.mktemp("drafter"), VOCAB, draft_vocab=range(0, VOCAB, 2))


def requests() -> list[Request]:
    """Two of each setting; the prompts share a beginning, so that the prefix cache hits."""
    rng, shared = np.random.default_rng(3), [1, 8, 2, 9, 4]
    return [
        request(f"{name} {copy}", [*shared, *rng.integers(0, VOCAB, 3)], max_tokens=LENGTH, **sampling)
        for name, sampling in SETTINGS.items()
        for copy in range(PER_SETTING)
    ]


def engine(checkpoint: Path | None, **sections: Any) -> Engine:
    return tiny_engine(checkpoint, vocab_size=VOCAB, eos_token_ids=(EOS,), **sections)


@pytest.fixture(scope="module")
def plain() -> dict[str, list[int]]:
    return run(engine(None, speculation={"mode": "off"}), requests())


def test_the_oracle_itself_is_the_definition(plain: dict[str, list[int]]) -> None:
    """One dense forward a token, the rules over the whole text so far, and the noise of the place."""
    target = tiny_decoder(VOCAB)
    for item in requests()[::PER_SETTING]:
        text = plain[item.request_id]
        logits = dense_logits(target, (*item.prompt_token_ids, *text))[len(item.prompt_token_ids) - 1 : -1]
        for position, row in enumerate(torch.from_numpy(logits)):
            adjuster = token_rules(VOCAB, [EOS])(item)
            if adjuster is not None:
                adjuster.commit(text[:position])
                adjuster.adjust(row.unsqueeze(0), [], Columns())
            chosen, noise = row.argmax(), shared_noise(item)
            if noise is not None:
                probs = filtered_probs(row.unsqueeze(0), sampling_rows([item.sampling], VOCAB))
                chosen = noisy_argmax(probs, torch.from_numpy(noise.keys(position, 1)), None)
            assert int(chosen) == text[position]
    assert len({tuple(text) for text in plain.values()}) > len(SETTINGS)  # the settings matter


@pytest.mark.parametrize("conditions", GRID, ids=str)
def test_every_mode_writes_the_same_texts(
    checkpoint: Path, plain: dict[str, list[int]], conditions: Conditions
) -> None:
    items = requests()[:: {1: 6, 4: 2}.get(conditions.concurrency, 1)]  # with few at a time, fewer are enough
    speculating = engine(checkpoint, **conditions.sections)
    check_texts(speculating, items, plain, conditions)
    assert (speculating.stats().prefix_hit_tokens > 0) == conditions.prefix_cache


def test_prompt_look_up_writes_the_same_texts(plain: dict[str, list[int]]) -> None:
    speculating = engine(None, speculation={"mode": "adaptive"}, engine={"max_running": 16})
    assert run(speculating, requests()) == plain
    assert speculating.counters.accepted_tokens > 0


def test_a_resumed_request_writes_what_is_missing(checkpoint: Path, plain: dict[str, list[int]]) -> None:
    """A replica died after six tokens: penalties, bad words and the least length still count them."""
    resumed = [
        Request(item.request_id, item.prompt_token_ids, item.sampling, tuple(plain[item.request_id][:6]))
        for item in requests()
        if len(plain[item.request_id]) > 6
    ]
    speculating = engine(checkpoint, speculation={"mode": "fixed"}, engine={"max_running": 16})
    texts = run(speculating, resumed)
    assert texts == {item.request_id: plain[item.request_id][6:] for item in resumed}
    assert len(resumed) > len(SETTINGS)
    assert speculating.counters.accepted_tokens > 0
