"""Offline runs: answers in order, a bounded number in flight, stop strings, an idle engine afterwards."""

from pathlib import Path

import pytest

from dspark_ray.core.clock import ManualClock
from dspark_ray.core.types import FinishReason, RequestOutput
from dspark_ray.engine.draft_log import DraftLog
from dspark_ray.engine.measure import distinct_ngrams, subtract, timed_run, warm_up
from dspark_ray.engine.offline import generate_all
from dspark_ray.models.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.tiny import TOKENIZER_VOCAB_SIZE, tiny_tokenizer_dir
from tests.tiny_engine import request, run, tiny_drafter_dir, tiny_engine

PROMPTS = [[1, 2, 3], [4, 4], [2], [3, 1, 4, 1], [1, 1, 1]]


def requests(max_tokens: int = 12) -> list:
    return [
        request(f"r{i}", prompt, temperature=0.0, max_tokens=max_tokens) for i, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drafter_dir(tmp_path_factory.mktemp("drafter"), 5, draft_vocab=None)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    (tmp_path / "model").mkdir()
    return Tokenizer.load(tiny_tokenizer_dir(tmp_path / "model"))


@pytest.mark.parametrize("concurrency", [1, 2, 16])
def test_answers_come_in_order(checkpoint: Path, concurrency: int) -> None:
    expected = run(tiny_engine(None, speculation={"mode": "off"}), requests())
    done = generate_all(tiny_engine(checkpoint), requests(), concurrency=concurrency)
    assert [c.request_id for c in done] == list(expected)
    assert [list(c.token_ids) for c in done] == list(expected.values())
    assert {c.finish_reason for c in done} == {FinishReason.LENGTH}
    assert [c.usage.completion_tokens for c in done] == [12] * len(PROMPTS)


def test_no_more_are_in_flight_than_asked(checkpoint: Path) -> None:
    engine = tiny_engine(checkpoint)
    most = 0

    def on_step(outputs: list[RequestOutput]) -> None:
        nonlocal most
        stats = engine.stats()
        most = max(most, stats.num_running + stats.num_waiting)

    generate_all(engine, requests(), concurrency=2, on_step=on_step)
    assert most == 2


def test_requests_come_at_their_times(checkpoint: Path) -> None:
    clock, engine = ManualClock(), tiny_engine(checkpoint)
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        clock.advance(1e3 * seconds)

    times = [0.0, 3.0, 5.0, 500.0, 900.0]  # the first three meet, the others find an idle engine
    done = generate_all(
        engine,
        requests(),
        concurrency=2,
        on_step=lambda outputs: clock.advance(1.0),
        clock=clock,
        arrivals_ms=times,
        sleep=sleep,
    )
    assert [c.submitted_ms for c in done] == times  # who had to wait for a place counts from then on
    assert [c.first_token_ms >= c.submitted_ms for c in done] == [True] * 5
    assert done[2].first_token_ms > min(done[0].ended_ms, done[1].ended_ms)
    assert len(naps) == 2
    expected = run(tiny_engine(None, speculation={"mode": "off"}), requests())
    assert [list(c.token_ids) for c in done] == list(expected.values())


def test_a_full_queue_is_waited_for() -> None:
    engine = tiny_engine(None, engine={"max_running": 1, "max_waiting": 1})
    done = generate_all(engine, requests(), concurrency=5)
    assert len(done) == len(PROMPTS)


def test_what_can_never_run_is_an_answer() -> None:
    items = [*requests(), request("long", [1] * 200, max_tokens=5)]
    done = generate_all(tiny_engine(None), items, concurrency=2)
    assert done[-1].finish_reason is FinishReason.ERROR
    assert "exceed" in done[-1].error
    assert all(not completion.error for completion in done[:-1])


def test_an_exception_leaves_the_engine_idle() -> None:
    engine = tiny_engine(None)

    def fail(outputs: list[RequestOutput]) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        generate_all(engine, requests(), concurrency=3, on_step=fail)
    assert not engine.has_work()
    assert engine.pool.num_free == engine.pool.num_blocks


@pytest.mark.parametrize("sections", [{}, {"speculation": {"mode": "off"}, "engine": {"ahead": "on"}}])
def test_stop_strings_end_the_text_and_the_request(tokenizer: Tokenizer, sections: dict) -> None:
    """Also where the next step runs already when the string is found."""

    def answer(stop: list[str]):
        engine = tiny_engine(None, vocab_size=TOKENIZER_VOCAB_SIZE, **sections)
        items = [request("a", tokenizer.encode("hello"), temperature=0.0, max_tokens=40)]
        detokenizers = [IncrementalDetokenizer(tokenizer, stop=stop)]
        (done,) = generate_all(engine, items, concurrency=1, detokenizers=detokenizers)
        assert not engine.has_work()
        return done

    whole = answer([])
    assert whole.finish_reason is FinishReason.LENGTH
    assert whole.text == tokenizer.decode(whole.token_ids)
    stop = next(c for c in whole.text[5:] if c.isascii())
    cut = answer([stop])
    assert cut.finish_reason is FinishReason.STOP
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert tokenizer.decode(cut.token_ids).endswith(stop)
    assert cut.usage.completion_tokens == len(cut.token_ids)


def test_counters_are_of_the_run_alone(checkpoint: Path) -> None:
    engine = tiny_engine(checkpoint)
    warm_up(engine, [1, 2])
    result = timed_run(engine, requests(), concurrency=2)
    counters = result.counters
    assert counters.emitted_tokens == result.num_tokens == 12 * len(PROMPTS)
    assert counters.drafted_tokens == counters.verified_tokens + counters.trimmed_tokens
    assert counters.verified_tokens == counters.accepted_tokens + counters.rejected_tokens
    assert counters.verified_per_position[0] > 0
    assert result.steps.num_steps == counters.target_steps
    assert result.tokens_per_s > 0


def test_steps_show_the_budgets(checkpoint: Path) -> None:
    engine = tiny_engine(checkpoint, speculation={"mode": "adaptive"})
    result = timed_run(engine, requests(40), concurrency=5)
    assert result.steps.trimmed_share > 0
    assert result.steps.distinct_budgets > 1
    assert 0 < result.steps.mean_budget_tokens < 5 * 4


def test_the_draft_log_says_what_the_counters_say(checkpoint: Path) -> None:
    engine = tiny_engine(checkpoint)
    engine.draft_log = DraftLog()
    generate_all(engine, requests(), concurrency=3)
    records = engine.draft_log.records
    assert sum(record.num_accepted for record in records) == engine.counters.accepted_tokens
    assert sum(record.num_verified for record in records) == engine.counters.verified_tokens
    assert all(record.confidence_logits is not None for record in records)
    assert all(record.rule == "greedy" for record in records)


def test_subtract_and_distinct() -> None:
    engine = tiny_engine(None)
    before = engine.stats().counters
    assert subtract(before, before) == before
    assert distinct_ngrams([[1, 2, 3, 4], [1, 2, 3, 4]]) == 0.5
    assert distinct_ngrams([[1, 2]]) == 1.0
