"""Token rules by their definitions, row by row, on the whole vocabulary and on a drafter's part of it."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from dspark_ray.core.errors import RequestError
from dspark_ray.core.types import Request, SamplingParams
from dspark_ray.models.adjust import FORBIDDEN, Columns, make_adjuster
from dspark_ray.models.token_rules import token_rules

VOCAB = 12
EOS = 11
PROMPT = (1, 2, 2, 3)
PARTIAL = torch.tensor([0, 2, 3, 5, 8, 11])


def adjusted(
    output: tuple[int, ...],
    drafted: tuple[int, ...] = (),
    vocab_map: torch.Tensor | None = None,
    rows: int = 0,
    **sampling: Any,
) -> np.ndarray:
    """The last `rows` rows (default: all) of random logits after the rules of a request. [n, W]"""
    request = Request("r", PROMPT, SamplingParams(**sampling), output)
    adjuster = make_adjuster(request, [token_rules(VOCAB, [EOS])])
    assert adjuster is not None
    columns = Columns(vocab_map)
    logits = columns.pick(original(len(drafted) + 1))[-rows:].clone()
    adjuster.adjust(logits, drafted, columns)
    return logits.numpy()


def original(rows: int) -> torch.Tensor:
    return torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(4))[:rows]


def expected_penalties(output: tuple[int, ...], rep: float, freq: float, pres: float) -> np.ndarray:
    logits, counts = original(8).numpy()[len(output) - 2].copy(), Counter(output)
    for token in range(VOCAB):
        if token in counts or token in PROMPT:
            logits[token] *= 1 / rep if logits[token] > 0 else rep
        logits[token] -= freq * counts[token] + pres * (counts[token] > 0)
    return logits


@pytest.mark.parametrize("vocab_map", [None, PARTIAL])
def test_penalties_count_the_accepted_prefix_of_the_block(vocab_map: torch.Tensor | None) -> None:
    output, drafted = (5, 5), (3, 5, 0, 3)
    got = adjusted(
        output, drafted, vocab_map, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.7
    )
    for row in range(len(drafted) + 1):
        want = torch.from_numpy(expected_penalties(output + drafted[:row], 1.3, 0.4, -0.7))
        np.testing.assert_allclose(got[row], Columns(vocab_map).pick(want), rtol=1e-6, atol=1e-6)
    last = adjusted(
        output, drafted, vocab_map, 1, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.7
    )
    np.testing.assert_array_equal(last, got[-1:])  # one row of drafting is that row of verification


def test_a_bias_moves_its_tokens_only() -> None:
    got = adjusted((), (1,), logit_bias=((3, 5.0), (4, -100.0)))
    want = original(2)
    want[:, 3] += 5.0
    want[:, 4] -= 100.0
    np.testing.assert_array_equal(got, want)
    partial = adjusted((), (), PARTIAL, logit_bias=((3, 5.0), (4, -100.0)))
    assert partial[0, 2] == original(1)[0, 3] + 5.0


def forbidden(logits: np.ndarray) -> list[list[int]]:
    return [np.flatnonzero(row == FORBIDDEN).tolist() for row in logits]


def test_bad_words_forbid_their_last_token_after_the_others() -> None:
    words = ((4,), (5, 6), (7, 5, 6), (8, 8))
    assert forbidden(adjusted((7,), (5, 8, 8), bad_words=words)) == [[4], [4, 6], [4, 8], [4, 8]]
    assert forbidden(adjusted((7, 5), (), bad_words=words)) == [[4, 6]]
    assert forbidden(adjusted((), (), PARTIAL, bad_words=((8,), (4,)))) == [[4]]  # the column of token 8


def test_nothing_ends_a_request_before_its_least_length() -> None:
    rules: dict[str, Any] = {"min_tokens": 3, "stop_token_ids": (2,)}
    assert forbidden(adjusted((1,), (1, 1, 1), **rules)) == [[2, 11], [2, 11], [], []]
    assert forbidden(adjusted((1,), (), ignore_eos=True, **rules)) == [[2]]


def test_only_allowed_tokens_are_left() -> None:
    kept = adjusted((), (1,), allowed_token_ids=(0, 5))
    assert np.isfinite(kept).sum(1).tolist() == [2, 2]
    np.testing.assert_array_equal(kept[:, [0, 5]], original(2)[:, [0, 5]])


def test_a_later_rule_gives_way_where_nothing_would_be_left() -> None:
    """Only over the whole vocabulary: a drafter has nothing to draft then, and is told so."""
    rules: dict[str, Any] = {"allowed_token_ids": (2, 5), "bad_words": ((5, 2), (5, 5))}
    assert forbidden(adjusted((2,), (), **rules)) == [[t for t in range(VOCAB) if t not in (2, 5)]]
    assert np.isfinite(adjusted((5,), (), **rules)).sum() == 2
    assert np.isfinite(adjusted((5,), (), PARTIAL, **rules)).sum() == 0


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"logit_bias": ((VOCAB, 1.0),)}, "logit_bias"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids"),
        ({"bad_words": ((1, VOCAB),)}, "bad_words"),
        ({"min_tokens": 1, "stop_token_ids": (VOCAB,)}, "stop_token_ids"),
        ({"allowed_token_ids": (3, 4), "bad_words": ((3,), (4,))}, "allowed_token_ids"),
        ({"allowed_token_ids": (EOS,), "min_tokens": 1}, "allowed_token_ids"),
    ],
)
def test_what_can_never_be_followed_is_refused(sampling: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        token_rules(VOCAB, [EOS])(Request("r", PROMPT, SamplingParams(**sampling)))
    assert caught.value.param == param


def test_requests_without_rules_have_no_adjuster() -> None:
    plain = SamplingParams(temperature=0.5, seed=1, stop_token_ids=(3,), top_p=0.5)
    assert token_rules(VOCAB, [EOS])(Request("r", PROMPT, plain)) is None
