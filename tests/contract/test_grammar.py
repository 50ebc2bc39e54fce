"""Grammars under speculation: every mode writes what plain decoding writes, and nothing that is illegal."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xgrammar

from dspark_ray.core.errors import RequestError
from dspark_ray.core.types import CompiledGrammar, FinishReason, Request
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.grammar import CACHED_GRAMMARS, Grammars
from dspark_ray.models.adjust import FORBIDDEN, Columns
from dspark_ray.models.grammar import MAX_JSON_BLANKS, GrammarAdjuster, GrammarVocabulary
from dspark_ray.serving.constraints import json_format, structural_tag
from dspark_ray.serving.reasoning import Reasoning
from tests.oracle_grid import GRID, Conditions, check_texts
from tests.reference import dense_logits
from tests.tiny_engine import request, run, tiny_decoder, tiny_drafter_dir, tiny_engine

VOCAB, END = 24, 0
TOKENS = ["", *(chr(ord("a") + i) for i in range(VOCAB - 1))]  # token 0 ends the text, 1 is a, ...
VOCABULARY = GrammarVocabulary(TOKENS, xgrammar.VocabType.RAW, [END])


def ebnf(grammar: str) -> CompiledGrammar:
    tag = {"type": "structural_tag", "format": {"type": "grammar", "grammar": grammar}}
    return VOCABULARY.compile(json.dumps(tag))


ENDLESS = ebnf("root ::= ([a-l] [g-r] [m-w])* ")  # may end after every third token
SEVEN = ebnf("root ::= [a-l] [a-f]{2} [m-w]{4}")
GRAMMARS = (ENDLESS, SEVEN, None)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drafter_dir(tmp_path_factory.mktemp("drafter"), VOCAB, draft_vocab=range(0, VOCAB, 2))


def engine(checkpoint: Path | None, **sections: Any) -> Engine:
    return tiny_engine(
        checkpoint,
        vocab_size=VOCAB,
        adjusters=[Grammars(lambda: VOCABULARY)],
        eos_token_ids=(END,),
        **sections,
    )


def requests(count: int = 12, **sampling: object) -> list[Request]:
    """Of all grammars in turn, and without one."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, VOCAB, rng.integers(2, 10)).tolist() for _ in range(count)]
    sampling = {"temperature": 0.0, "max_tokens": 24} | sampling
    return [
        replace(request(str(i), prompt, **sampling), grammar=GRAMMARS[i % len(GRAMMARS)])
        for i, prompt in enumerate(prompts)
    ]


def is_legal(grammar: CompiledGrammar, tokens: Sequence[int]) -> bool:
    walk = VOCABULARY.walk(VOCABULARY.load_grammar(grammar))
    return all(walk.accept(token) for token in tokens)


@pytest.fixture(scope="module")
def plain() -> dict[str, list[int]]:
    return run(engine(None, speculation={"mode": "off"}), requests())


def test_plain_texts_are_legal_and_end_where_their_grammar_does(plain: dict[str, list[int]]) -> None:
    for item in requests():
        if item.grammar is not None:
            assert is_legal(item.grammar, plain[item.request_id])
        if item.grammar is SEVEN:
            assert len(plain[item.request_id]) == 8
            assert plain[item.request_id][-1] == END
    free = [item.request_id for item in requests() if item.grammar is None]
    assert not all(is_legal(ENDLESS, plain[name]) for name in free)  # the grammars do change the texts


@pytest.mark.parametrize(
    "conditions", [one for one in GRID if one.mode in ("fixed", "adaptive") or one.concurrency == 16], ids=str
)
def test_every_mode_writes_the_same_texts(
    checkpoint: Path, plain: dict[str, list[int]], conditions: Conditions
) -> None:
    items = requests()[: 6 if conditions.concurrency == 1 else None]  # one after the other, fewer are enough
    check_texts(engine(checkpoint, **conditions.sections), items, plain, conditions)


def test_prompt_look_up_writes_the_same_texts(plain: dict[str, list[int]]) -> None:
    speculating = engine(None, speculation={"mode": "fixed"})
    assert run(speculating, requests()) == plain
    assert speculating.counters.accepted_tokens > 0


def test_a_resumed_request_goes_on_where_its_grammar_was(
    checkpoint: Path, plain: dict[str, list[int]]
) -> None:
    for item in requests()[:6]:
        whole = plain[item.request_id]
        for cut in {1, len(whole) // 2, len(whole) - 1}:
            resumed = replace(item, emitted_token_ids=tuple(whole[:cut]))
            assert (
                run(engine(checkpoint, speculation={"mode": "fixed"}), [resumed])[item.request_id]
                == whole[cut:]
            )


def test_sampled_texts_are_legal(checkpoint: Path) -> None:
    sampled = requests(48, temperature=1.0)
    speculating = engine(checkpoint, speculation={"mode": "fixed"})
    texts = run(speculating, sampled)
    assert speculating.counters.accepted_tokens > 0
    assert speculating.counters.rejected_tokens > 0
    assert all(is_legal(item.grammar, texts[item.request_id]) for item in sampled if item.grammar)


def test_the_end_of_a_grammar_is_the_end_of_the_text(checkpoint: Path) -> None:
    speculating = engine(checkpoint, speculation={"mode": "fixed"})
    speculating.add_request(requests()[1])
    outputs = []
    while speculating.has_work():
        outputs += speculating.step()
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert speculating.counters.verified_tokens > speculating.counters.accepted_tokens


@pytest.mark.parametrize("columns", [Columns(), Columns(torch.arange(0, VOCAB, 2))])
@pytest.mark.parametrize("drafted", [[], [1], [1, 2, 3], [1, 20, 3], [1, 2, 3, 13, 13, 13, 13, END, 5]])
def test_rows_are_masked_by_what_stands_before_them(columns: Columns, drafted: list[int]) -> None:
    loaded = VOCABULARY.load_grammar(SEVEN)
    adjuster = GrammarAdjuster(VOCABULARY.walk(loaded))
    rows = columns.pick(torch.zeros(len(drafted) + 1, VOCAB))
    adjuster.adjust(rows, drafted, columns)
    for position in range(len(drafted) + 1):
        walk = VOCABULARY.walk(loaded)
        if not all(walk.accept(token) for token in drafted[:position]) or walk.ended:
            break  # not reached
        allowed = columns.pick(torch.from_numpy(walk.allowed()))
        if allowed.any():
            assert torch.equal(rows[position] != FORBIDDEN, allowed)
        one = columns.pick(torch.zeros(1, VOCAB))
        adjuster.adjust(one, drafted[:position], columns)  # as the drafter asks: one slot at a time
        assert torch.equal(one[0], rows[position])
    adjuster.commit([1])
    again = torch.zeros(1, VOCAB)
    adjuster.adjust(again, [], Columns())
    assert torch.equal(again[0] != FORBIDDEN, torch.tensor([0 < i <= 6 for i in range(VOCAB)]))


def test_other_rules_give_way_where_they_forbid_all_that_is_legal(checkpoint: Path) -> None:
    short = replace(request("0", (1, 3, 2), temperature=0.0, min_tokens=5), grammar=ebnf('root ::= "a"'))
    assert run(engine(checkpoint, speculation={"mode": "fixed"}), [short])["0"] == [1, END]


def test_a_dead_end_may_only_end(checkpoint: Path) -> None:
    stuck = replace(requests()[0], grammar=ebnf('root ::= "a" "é"'))  # no token spells é
    assert run(engine(checkpoint, speculation={"mode": "fixed"}), [stuck])["0"] == [1, END]


def test_the_joint_law_is_the_masked_targets(checkpoint: Path) -> None:
    """Chi-square of the first two tokens under a grammar that removes half of what is drafted."""
    prompt, count = (1, 3, 2), 900
    grammar = ebnf("root ::= [a-f] [j-o] [m-w]*")
    firsts, seconds = range(1, 7), range(10, 16)
    expected, observed = np.zeros((VOCAB, VOCAB)), np.zeros((VOCAB, VOCAB))
    for first in firsts:
        chance = masked_probs(prompt, firsts)[first]
        expected[first] = count * chance * masked_probs((*prompt, first), seconds)
    # With four at a time, much of a draft is verified and much is not.
    speculating = engine(checkpoint, speculation={"mode": "adaptive"}, engine={"max_running": 4})
    sampling = {"temperature": 1.0, "max_tokens": 4, "shared_noise": False}
    for start in range(0, count, 300):
        batch = [request(str(seed), prompt, seed=seed, **sampling) for seed in range(start, start + 300)]
        for tokens in run(speculating, [replace(item, grammar=grammar) for item in batch]).values():
            observed[tokens[0], tokens[1]] += 1
    assert speculating.counters.accepted_tokens > 100
    assert speculating.counters.trimmed_tokens > speculating.counters.drafts
    common = expected >= 5
    assert observed[expected == 0].sum() == 0
    rare = expected[~common].sum(), observed[~common].sum()
    expected, observed = np.append(expected[common], rare[0]), np.append(observed[common], rare[1])
    statistic, freedom = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    assert (statistic - freedom) / np.sqrt(2 * freedom) < 4


def masked_probs(tokens: tuple[int, ...], allowed: range) -> np.ndarray:
    """The target's next-token law after `tokens` on the legal tokens. [V]"""
    logits = torch.from_numpy(dense_logits(tiny_decoder(VOCAB), tokens)[-1])
    masked = torch.full((VOCAB,), FORBIDDEN).index_copy(0, torch.tensor(list(allowed)), logits[list(allowed)])
    return masked.softmax(0).double().numpy()


@pytest.mark.parametrize(
    "grammar", ["root ::= x", "%%%", 'root ::= "a', "", 'rule ::= "a"', "root ::= [z-a]"]
)
def test_what_is_no_grammar_is_refused(grammar: str) -> None:
    with pytest.raises(RequestError) as caught:
        ebnf(grammar)
    assert caught.value.code == "invalid_grammar"


def test_a_grammar_of_another_vocabulary_is_refused() -> None:
    other = GrammarVocabulary(["", "x", "y"], xgrammar.VocabType.RAW, [0])
    with pytest.raises(RequestError, match="another vocabulary"):
        other.load_grammar(SEVEN)


def test_a_loaded_grammar_waits_for_no_other_one() -> None:
    """What the step loop asks for is there at once while another thread loads; the oldest are forgotten."""
    grammars = Grammars(lambda: VOCABULARY)
    asked = replace(requests()[0], grammar=SEVEN)
    work = grammars.slow_work(asked)
    assert work is not None
    work()
    assert grammars.slow_work(asked) is None
    with grammars._lock:  # as a load that takes long would hold it
        assert grammars(asked) is not None
    for number in range(CACHED_GRAMMARS):
        other = ebnf(f'root ::= "{"a" * (number + 1)}"')
        grammars(replace(asked, grammar=other))
    assert grammars.slow_work(asked) is not None
    assert grammars(replace(asked, grammar=None)) is None


def test_blanks_in_a_json_text_end() -> None:
    """A model that always prefers a blank writes a whole text all the same."""
    blank = len('{}":xy') + 1
    tokens = ["", *'{}":xy', " ", "\n", "    "]
    vocabulary = GrammarVocabulary(tokens, xgrammar.VocabType.RAW, [END])
    schema = {"type": "object", "properties": {"x": {"enum": ["y"]}}, "required": ["x"]}
    tag = structural_tag(json_format(schema), Reasoning.NONE)
    walk = vocabulary.walk(vocabulary.load_grammar(vocabulary.compile(tag)), tag)
    text = ""
    while not walk.ended:
        allowed = walk.allowed()
        assert allowed is not None
        token = blank if allowed[blank] else int(np.flatnonzero(allowed)[0])
        assert walk.accept(token)
        walk.step_back(1)  # a draft that is taken back leaves no trace
        assert walk.accept(token)
        text += tokens[token]
        assert len(text) < 100
    assert text.count(" ") == 4 * MAX_JSON_BLANKS
    assert json.loads(text) == {"x": "y"}
