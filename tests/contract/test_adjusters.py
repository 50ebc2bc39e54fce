"""Adjusters of logits under speculation: the same text and the same law as plain decoding with them."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from dspark_ray.core.types import Request
from dspark_ray.engine.engine import Engine
from dspark_ray.models.adjust import FORBIDDEN, AdjusterChain, Columns, LogitsAdjuster, make_adjuster
from tests.reference import dense_logits
from tests.tiny_engine import collect, request, run, tiny_decoder, tiny_drafter_dir, tiny_engine

VOCAB = 24
SPECULATING = ("fixed", "threshold", "algorithm1", "adaptive")


def allowed_after(token: int, vocab_size: int) -> np.ndarray:
    """The toy grammar: after each token, another half of the vocabulary. [V] bool"""
    return (np.arange(vocab_size) + token) % 4 < 2


class HalfGrammar:
    """Forbids, with a state that walks along the text, and favours what is left unequally."""

    def __init__(self, last: int, vocab_size: int) -> None:
        self._last, self._vocab_size = last, vocab_size

    def adjust(self, logits: torch.Tensor, drafted: Sequence[int], columns: Columns) -> None:
        walk = [self._last, *drafted][-len(logits) :]
        for row, token in zip(logits, walk, strict=True):
            mask = columns.pick(torch.from_numpy(allowed_after(token, self._vocab_size)))
            row[~mask] = FORBIDDEN
            found, _ = columns.find(torch.tensor([(token * 7) % self._vocab_size]))
            row[found] += 0.5

    def commit(self, token_ids: Sequence[int]) -> None:
        self._last = token_ids[-1]


def half_grammar(vocab_size: int):
    return lambda request: HalfGrammar(request.prompt_token_ids[-1], vocab_size)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drafter_dir(tmp_path_factory.mktemp("drafter"), VOCAB, draft_vocab=range(0, VOCAB, 2))


def requests(count: int, **sampling) -> list[Request]:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, rng.integers(2, 10)).tolist() for _ in range(count)]
    return [
        request(str(i), prompt, temperature=0.0, max_tokens=24, **sampling)
        for i, prompt in enumerate(prompts)
    ]


def constrained(checkpoint: Path | None, mode: str, **sections) -> Engine:
    speculation = {"mode": mode, "threshold": 0.2}
    return tiny_engine(
        checkpoint,
        vocab_size=VOCAB,
        adjusters=[half_grammar(VOCAB)],
        speculation=speculation,
        **sections,
    )


def plain_text(prompt: Sequence[int], length: int) -> list[int]:
    """Greedy decoding under the toy grammar, one dense forward a token."""
    target, text = tiny_decoder(VOCAB), list(prompt)
    for _ in range(length):
        logits = torch.from_numpy(dense_logits(target, tuple(text))[-1:])
        HalfGrammar(text[-1], VOCAB).adjust(logits, [], Columns())
        text.append(int(logits.argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize(
    ("mode", "drafter"), [*((mode, "dspark") for mode in SPECULATING), ("fixed", "ngram")]
)
def test_constrained_greedy_text_is_plain_decodings(checkpoint: Path, mode: str, drafter: str) -> None:
    engine = constrained(checkpoint if drafter == "dspark" else None, mode)
    texts = run(engine, requests(4))
    for item in requests(4):
        assert texts[item.request_id] == plain_text(item.prompt_token_ids, 24)
    assert engine.counters.drafted_tokens > 0
    assert engine.counters.accepted_tokens > 0
    if mode == "adaptive":
        assert engine.counters.trimmed_tokens > 0


def test_resumption_and_preemption_keep_the_state(checkpoint: Path) -> None:
    texts = {r.request_id: plain_text(r.prompt_token_ids, 24) for r in requests(6)}
    tight = constrained(
        checkpoint,
        "fixed",
        engine={"kv_num_blocks": 12, "prefix_cache": False},
        model={"max_model_len": 48},
    )
    assert run(tight, requests(6)) == texts
    assert tight.stats().num_preemptions > 0
    item = requests(6)[3]
    resumed = Request("3", item.prompt_token_ids, item.sampling, tuple(texts["3"][:7]))
    assert run(constrained(checkpoint, "fixed"), [resumed])["3"] == texts["3"][7:]


def test_no_forbidden_token_is_drafted_where_another_can_be(checkpoint: Path) -> None:
    engine = constrained(checkpoint, "fixed")
    draftable = {int(t) for t in engine.drafter.vocab_map}  # type: ignore[union-attr, arg-type]
    for item in requests(6):
        engine.add_request(item)
    texts: dict[str, list[int]] = {str(i): [] for i in range(6)}
    num_seen = 0
    while engine.has_work():
        collect(engine.step(), texts)
        for sequence in engine.admission.decoding():
            if sequence.draft is None:
                continue
            walk = [sequence.token_ids[-1], *sequence.draft.token_ids]
            for before, token in itertools.pairwise(walk):
                mask = allowed_after(before, VOCAB)
                assert mask[token] or not any(mask[t] for t in draftable)
                num_seen += 1
    assert num_seen > 100


class NothingToDraft:
    """Forbids every token of the drafter's part of the vocabulary after an even one."""

    def __init__(self, last: int) -> None:
        self._last = last

    def adjust(self, logits: torch.Tensor, drafted: Sequence[int], columns: Columns) -> None:
        for row, token in zip(logits, [self._last, *drafted][-len(logits) :], strict=True):
            if token % 2 == 0:
                found, _ = columns.find(torch.arange(0, VOCAB, 2))
                row[found] = FORBIDDEN

    def commit(self, token_ids: Sequence[int]) -> None:
        self._last = token_ids[-1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_nothing_can_be_drafted_a_sure_rejection_stands_in(
    checkpoint: Path, temperature: float
) -> None:
    """Lengths of drafts must not tell what was drafted: the block keeps its size, with survival 0."""
    engine = tiny_engine(
        checkpoint, vocab_size=VOCAB, adjusters=[lambda r: NothingToDraft(r.prompt_token_ids[-1])]
    )
    engine.add_request(request("0", [2, 4], temperature=temperature, max_tokens=40))
    text: dict[str, list[int]] = {"0": [4]}
    closed = 0
    while engine.has_work():
        collect(engine.step(), text)
        for sequence in engine.admission.decoding():
            if sequence.draft is not None and sequence.token_ids[-1] % 2 == 0:
                assert len(sequence.draft.token_ids) == 4
                assert (sequence.draft.survival == 0).all()
                closed += 1
    assert closed > 2
    assert all(after % 2 for before, after in itertools.pairwise(text["0"]) if before % 2 == 0)


class Add:
    """Adds to every logit, so that an order of application shows."""

    def __init__(self, factor: float, term: float) -> None:
        self.factor, self.term, self.seen = factor, term, []

    def adjust(self, logits: torch.Tensor, drafted: Sequence[int], columns: Columns) -> None:
        logits.mul_(self.factor).add_(self.term)

    def commit(self, token_ids: Sequence[int]) -> None:
        self.seen += token_ids


def test_several_adjusters_apply_in_order_and_see_what_was_emitted() -> None:
    first, second = Add(1.0, 2.0), Add(3.0, 0.0)
    item = Request("r", (1,), request("r", [1]).sampling, (5, 6))
    made: LogitsAdjuster | None = make_adjuster(item, [lambda r: first, lambda r: None, lambda r: second])
    assert isinstance(made, AdjusterChain)
    logits = torch.ones(1, 4)
    made.adjust(logits, [], Columns())
    assert logits.tolist() == [[9.0] * 4]
    assert first.seen == second.seen == [5, 6]
    assert make_adjuster(item, [lambda r: None]) is None


def test_columns_of_a_partial_vocabulary() -> None:
    columns = Columns(torch.tensor([1, 4, 6]))
    found, places = columns.find(torch.tensor([6, 2, 1, 9]))
    assert (found.tolist(), places.tolist()) == ([2, 0], [0, 2])
    assert columns.pick(torch.arange(8) * 10).tolist() == [10, 40, 60]
