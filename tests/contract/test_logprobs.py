"""Log-probabilities: row j of a verified block is the distribution of output token j."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark_ray.core.types import Request, TokenLogprobs
from dspark_ray.engine.engine import Engine
from tests.reference import dense_logits
from tests.tiny_engine import request, tiny_decoder, tiny_drafter_dir, tiny_engine

VOCAB = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drafter_dir(tmp_path_factory.mktemp("drafter"), VOCAB, draft_vocab=range(0, VOCAB, 2))


class Collected:
    """What one request was answered."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt: list[TokenLogprobs] = []


def collected(engine: Engine, requests: list[Request]) -> dict[str, Collected]:
    answers = {item.request_id: Collected() for item in requests}
    for item in requests:
        engine.add_request(item)
    while engine.has_work():
        for output in engine.step():
            answer = answers[output.request_id]
            answer.tokens += output.token_ids
            answer.logprobs += output.logprobs
            answer.prompt += output.prompt_logprobs
    return answers


def check(found: list[TokenLogprobs], token_ids: list[int], logits: np.ndarray, num_top: int) -> None:
    """Each against the rows [N, V] of the dense forward."""
    expected = torch.from_numpy(logits).log_softmax(-1)
    assert len(found) == len(token_ids) == len(expected)
    for one, token, row in zip(found, token_ids, expected, strict=True):
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-4)
        best = row.topk(num_top)
        assert [token_id for token_id, _ in one.top] == best.indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 3},
    "none on top": {"temperature": 0.0, "logprobs": 0},
    "seeded": {"temperature": 1.3, "seed": 1, "top_k": 5, "logprobs": 2},
    "drawn": {"temperature": 1.0, "logprobs": 2},
    # The drafter is biased alike: much of this one is accepted.
    "ruled": {"temperature": 0.0, "logprobs": 1, "presence_penalty": 1.0, "logit_bias": ((8, 9.0),)},
    "stopped": {"temperature": 0.0, "logprobs": 1, "stop_token_ids": (2, 4, 6, 8)},
    "silent": {"temperature": 0.0},
}


@pytest.mark.parametrize("mode", ["off", "fixed", "adaptive"])
def test_logprobs_are_the_targets_whatever_was_drafted(checkpoint: Path, mode: str) -> None:
    prompt = [1, 8, 2, 9]
    engine = tiny_engine(checkpoint, vocab_size=VOCAB, speculation={"mode": mode})
    answers = collected(
        engine, [request(name, prompt, max_tokens=14, **sampling) for name, sampling in SETTINGS.items()]
    )
    target = tiny_decoder(VOCAB)
    assert answers.pop("silent").logprobs == []
    for name, answer in answers.items():
        logits = dense_logits(target, (*prompt, *answer.tokens))[len(prompt) - 1 : -1]
        check(answer.logprobs, answer.tokens, logits, SETTINGS[name]["logprobs"])
        assert answer.prompt == []
    if mode != "off":
        assert engine.counters.accepted_tokens > 0
        assert engine.counters.rejected_tokens > 0


@pytest.mark.parametrize("max_step_rows", [16, 256])
def test_prompt_logprobs_in_chunks_and_over_a_cached_prefix(checkpoint: Path, max_step_rows: int) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, size).tolist() for size in (1, 2, 37)]
    engine = tiny_engine(
        checkpoint, vocab_size=VOCAB, engine={"max_step_rows": max_step_rows, "max_running": 8}
    )
    for turn in range(2):
        items = [
            request(f"{turn} {i}", prompt, temperature=0.0, max_tokens=3, prompt_logprobs=2)
            for i, prompt in enumerate(prompts)
        ]
        for item, answer in zip(items, collected(engine, items).values(), strict=True):
            prompt = list(item.prompt_token_ids)
            check(answer.prompt, prompt[1:], dense_logits(tiny_decoder(VOCAB), tuple(prompt))[:-1], 2)
    assert engine.admission.hit_tokens == 0
    again = collected(engine, [request("cached", prompts[2], temperature=0.0, max_tokens=3)])
    assert again["cached"].prompt == []
    assert engine.admission.hit_tokens == 36


def test_a_preempted_or_resumed_prompt_is_told_once(checkpoint: Path) -> None:
    engine = tiny_engine(
        checkpoint,
        vocab_size=VOCAB,
        engine={"kv_num_blocks": 12, "prefix_cache": False, "max_step_rows": 20, "max_running": 4},
        model={"max_model_len": 48},
    )
    items = [
        request(str(i), [i, *range(1, 14)], max_tokens=20, temperature=0.0, prompt_logprobs=1)
        for i in range(4)
    ]
    answers = collected(engine, items)
    assert engine.stats().num_preemptions > 0
    for item in items:
        prompt = list(item.prompt_token_ids)
        check(
            answers[item.request_id].prompt,
            prompt[1:],
            dense_logits(tiny_decoder(VOCAB), tuple(prompt))[:-1],
            1,
        )
    resumed = Request("r", items[0].prompt_token_ids, items[0].sampling, tuple(answers["0"].tokens[:4]))
    assert collected(engine, [resumed])["r"].prompt == []
