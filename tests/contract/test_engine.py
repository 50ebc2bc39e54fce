"""The engine as a whole on tiny fp32 models: equal texts in every mode, and nothing lost on any path."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark_ray.core.errors import QueueFullError, RequestError
from dspark_ray.core.types import FinishReason, RequestOutput, StepPlan
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.recent import StepRecord
from dspark_ray.models.drafters.checkpoint import load_checkpoint
from tests.reference import dense_logits
from tests.tiny_engine import collect, request, run, tiny_decoder, tiny_drafter_dir, tiny_engine

VOCAB = 24
SPECULATING = ("fixed", "threshold", "algorithm1", "adaptive")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half the vocabulary is drafted; greedy texts of a tiny model loop, so that much is accepted."""
    return tiny_drafter_dir(tmp_path_factory.mktemp("drafter"), VOCAB, draft_vocab=range(0, VOCAB, 2))


def prompts(count: int, length: int = 9, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(2, length + 1)).tolist() for _ in range(count)]


def greedy_requests(count: int, max_tokens: int = 24, **sampling: Any) -> list[Any]:
    return [
        request(str(i), prompt, temperature=0.0, max_tokens=max_tokens, **sampling)
        for i, prompt in enumerate(prompts(count))
    ]


def check_identities(engine: Engine) -> None:
    c = engine.counters
    assert c.drafted_tokens == c.verified_tokens + c.trimmed_tokens
    assert c.verified_tokens == c.accepted_tokens + c.rejected_tokens
    assert sum(c.accepted_per_position) == c.accepted_tokens
    assert sum(c.verified_per_position) == c.verified_tokens
    assert c.decode_tokens <= c.accepted_tokens + c.request_steps


def check_empty(engine: Engine) -> None:
    assert not engine.has_work()
    assert engine.pool.num_used == 0
    assert engine.stats().num_running == engine.stats().num_waiting == 0
    check_identities(engine)


def plain_texts(**sections: Any) -> dict[str, list[int]]:
    engine = tiny_engine(None, vocab_size=VOCAB, speculation={"mode": "off"}, **sections)
    texts = run(engine, greedy_requests(12))
    check_empty(engine)
    return texts


def test_plain_decoding_is_the_targets_argmax() -> None:
    target = tiny_decoder(VOCAB)
    for item, tokens in zip(greedy_requests(12), plain_texts().values(), strict=True):
        text = (*item.prompt_token_ids, *tokens)
        best = dense_logits(target, text).argmax(-1).tolist()
        assert tokens == best[len(item.prompt_token_ids) - 1 : -1]


@pytest.mark.parametrize("drafter", ["dspark", "ngram"])
@pytest.mark.parametrize("mode", SPECULATING)
def test_greedy_text_equals_plain(checkpoint: Path, mode: str, drafter: str) -> None:
    engine = tiny_engine(
        checkpoint if drafter == "dspark" else None,
        vocab_size=VOCAB,
        speculation={"mode": mode, "threshold": 0.2},
        engine={"max_step_rows": 64},
    )
    budgets = set()
    texts: dict[str, list[int]] = {str(i): [] for i in range(12)}
    for item in greedy_requests(12):
        engine.add_request(item)
    while engine.has_work():
        collect(engine.step(), texts)
        budgets.add(engine.recent_steps()[-1].budget_tokens)
    assert texts == plain_texts()
    assert engine.counters.drafted_tokens > 0
    assert engine.counters.accepted_tokens > 0
    if mode == "adaptive":
        assert engine.counters.trimmed_tokens > 0
        assert len(budgets) >= 3
    check_empty(engine)


def test_every_verified_row_is_a_token_of_the_step(checkpoint: Path) -> None:
    """Trimming happens before the target runs: rows = decoding requests + budget (+ prefill)."""
    engine = tiny_engine(checkpoint, vocab_size=VOCAB, speculation={"mode": "adaptive"})
    for item in greedy_requests(8):
        engine.add_request(item)
    records: list[StepRecord] = []
    while engine.has_work():
        engine.step()
        records.append(engine.recent_steps()[-1])
    decode_only = [r for r in records if r.num_decoding and r.rows == r.num_decoding + r.budget_tokens]
    assert len(decode_only) >= len(records) - 2  # all but the steps that prefill


@pytest.mark.parametrize("mode", ["off", "adaptive", "fixed"])
def test_preemption_changes_no_text(checkpoint: Path, mode: str) -> None:
    engine = tiny_engine(
        checkpoint,
        vocab_size=VOCAB,
        speculation={"mode": mode},
        engine={"kv_num_blocks": 20, "prefix_cache": False},
        model={"max_model_len": 64},
    )
    texts = run(engine, greedy_requests(12))
    assert engine.stats().num_preemptions > 0
    assert texts == plain_texts()
    check_empty(engine)


def test_chunked_prefill_changes_no_text(checkpoint: Path) -> None:
    engine = tiny_engine(checkpoint, vocab_size=VOCAB, engine={"max_step_rows": 16, "max_running": 8})
    assert run(engine, greedy_requests(12)) == plain_texts()
    assert engine.counters.accepted_tokens > 0
    check_empty(engine)


def test_steps_never_exceed_their_rows(checkpoint: Path) -> None:
    """Requests × (γ + 1) above the row limit: drafts give way."""
    engine = tiny_engine(checkpoint, vocab_size=VOCAB, engine={"max_step_rows": 16, "max_running": 16})
    for item in greedy_requests(12):
        engine.add_request(item)
    while engine.has_work():
        engine.step()
        assert engine.recent_steps()[-1].rows <= 16


def shared_prompt() -> list[int]:
    return np.random.default_rng(7).integers(0, VOCAB, 21).tolist()


def test_prefix_hits_with_a_drafter(checkpoint: Path) -> None:
    """A repeated prompt hits, carries the drafter's context along, and accepts as much as the first time."""
    engine = tiny_engine(checkpoint, vocab_size=VOCAB)
    accepted, texts = [], []
    for turn in range(2):
        before = engine.counters.accepted_tokens
        texts.append(
            run(engine, [request(str(turn), shared_prompt(), temperature=1.0, seed=3, max_tokens=100)])
        )
        accepted.append(engine.counters.accepted_tokens - before)
    assert texts[0]["0"] == texts[1]["1"]
    assert engine.stats().prefix_hit_tokens == 20  # five full blocks of four
    assert accepted[0] == accepted[1] > 0


def test_a_drafter_takes_no_hit_away(checkpoint: Path) -> None:
    """The same prompt tokens are found in the cache with a drafter and without, eight repeats at once."""
    hits = []
    for path, mode in ((checkpoint, "fixed"), (None, "off")):
        engine = tiny_engine(path, vocab_size=VOCAB, speculation={"mode": mode})
        run(engine, [request("first", shared_prompt(), temperature=0.0, max_tokens=12)])
        run(engine, [request(str(i), [*shared_prompt(), i], temperature=0.0) for i in range(8)])
        hits.append(engine.stats().prefix_hit_tokens)
    assert hits[0] == hits[1] == 8 * 20


def test_an_arrival_with_a_prefix_hit_leaves_shared_blocks_alone(checkpoint: Path) -> None:
    """Neither the target's nor the drafter's half of a shared block is written by the newcomer."""
    engine = tiny_engine(checkpoint, vocab_size=VOCAB)
    engine.add_request(request("a", shared_prompt(), temperature=0.0, max_tokens=40))
    for _ in range(3):
        engine.step()
    shared = engine.admission.running[0].blocks[:5]
    slots = torch.tensor([b * 4 + i for b in shared for i in range(4)])
    drafter_kv = engine.drafter.backbone.kv  # type: ignore[union-attr]
    before = [t[:, slots].clone() for t in (engine.kv.k, engine.kv.v, drafter_kv.k, drafter_kv.v)]
    engine.add_request(request("b", [*shared_prompt(), 1, 2], temperature=0.0, max_tokens=10))
    for _ in range(4):
        engine.step()
    assert engine.admission.hit_tokens >= 20
    after = [t[:, slots] for t in (engine.kv.k, engine.kv.v, drafter_kv.k, drafter_kv.v)]
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0)


def test_drafting_after_a_pause_equals_drafting_throughout(checkpoint: Path) -> None:
    """Steps without a draft still write the drafter's context: k > 0, k = 0, k > 0 on one request."""
    engine = tiny_engine(checkpoint, vocab_size=VOCAB)
    engine.add_request(request("a", shared_prompt(), temperature=0.0, max_tokens=60))
    for _ in range(3):
        engine.step()
    paused = engine.budget.wants_draft
    engine.budget.wants_draft = lambda decoding, load: []  # type: ignore[method-assign]
    for _ in range(6):
        engine.step()
    engine.budget.wants_draft = paused  # type: ignore[method-assign]
    engine.step()
    sequence = engine.admission.running[0]
    fresh = tiny_engine(checkpoint, vocab_size=VOCAB)
    fresh.add_request(request("a", sequence.token_ids[:-1], temperature=0.0, max_tokens=40))
    fresh.step()
    other = fresh.admission.running[0]
    assert other.token_ids == sequence.token_ids
    assert sequence.draft is not None
    assert other.draft is not None
    assert other.draft.token_ids == sequence.draft.token_ids


@pytest.mark.parametrize("mode", ["off", "fixed"])
def test_stop_conditions_in_emission_order(checkpoint: Path, mode: str) -> None:
    """EOS and stop ids end a request at the first of them, however many tokens the step accepted."""
    plain = plain_texts()["0"]
    stop = plain[10]
    first = plain.index(stop)
    for how in ("eos", "stop_token_ids"):
        engine = tiny_engine(
            checkpoint,
            vocab_size=VOCAB,
            eos_token_ids=(stop,) if how == "eos" else (),
            speculation={"mode": mode},
        )
        sampling = {"stop_token_ids": (stop,)} if how == "stop_token_ids" else {}
        engine.add_request(request("0", prompts(1)[0], temperature=0.0, max_tokens=24, **sampling))
        last = run_to_end(engine)
        assert last.finish_reason is FinishReason.STOP
        assert last.usage is not None
        assert last.usage.completion_tokens == first + 1
        check_empty(engine)


def test_ignore_eos_and_length(checkpoint: Path) -> None:
    stop = plain_texts()["0"][3]
    engine = tiny_engine(checkpoint, vocab_size=VOCAB, eos_token_ids=(stop,))
    engine.add_request(request("0", prompts(1)[0], temperature=0.0, max_tokens=24, ignore_eos=True))
    last = run_to_end(engine)
    assert last.finish_reason is FinishReason.LENGTH
    assert last.usage is not None
    assert last.usage.completion_tokens == 24


def run_to_end(engine: Engine) -> RequestOutput:
    last = None
    while engine.has_work():
        for output in engine.step():
            last = output
    assert last is not None
    return last


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_short_requests_waste_no_rows(checkpoint: Path, max_tokens: int) -> None:
    """What can no longer be emitted is not verified."""
    engine = tiny_engine(checkpoint, vocab_size=VOCAB)
    texts = run(engine, [request("0", prompts(1)[0], temperature=0.0, max_tokens=max_tokens)])
    assert len(texts["0"]) == max_tokens
    assert engine.counters.verified_tokens <= max(0, max_tokens - 2)
    check_empty(engine)


def test_abort_at_any_moment_frees_everything(checkpoint: Path) -> None:
    for steps in range(6):
        engine = tiny_engine(checkpoint, vocab_size=VOCAB, engine={"max_step_rows": 16, "max_running": 4})
        for item in greedy_requests(8):
            engine.add_request(item)
        for _ in range(steps):
            engine.step()
        for index in range(8):
            engine.abort(str(index))
        assert not engine.abort("0")
        check_empty(engine)
        assert engine.step() == []


def test_a_recycled_slot_does_not_see_its_old_owner(checkpoint: Path) -> None:
    """Abort between draft and verify, then reuse the blocks at once: the newcomer's text is its own."""
    engine = tiny_engine(checkpoint, vocab_size=VOCAB, engine={"kv_num_blocks": 32, "max_running": 1})
    requests = greedy_requests(12)
    plain = plain_texts()
    for first, second in zip(requests[:6], requests[6:], strict=True):
        engine.add_request(first)
        for _ in range(3):
            engine.step()
        engine.abort(first.request_id)
        assert run(engine, [second])[second.request_id] == plain[second.request_id]
    check_empty(engine)


def test_resumption_continues_the_text(checkpoint: Path) -> None:
    """A request that comes with emitted tokens (its replica died) emits only what follows them."""
    plain = plain_texts()["3"]
    item = greedy_requests(12)[3]
    engine = tiny_engine(checkpoint, vocab_size=VOCAB)
    resumed = type(item)(item.request_id, item.prompt_token_ids, item.sampling, tuple(plain[:7]))
    engine.add_request(resumed)
    tokens, last = [], None
    while engine.has_work():
        for last in engine.step():
            tokens += last.token_ids
    assert tokens == plain[7:]
    assert last is not None
    assert last.usage is not None
    assert last.usage.completion_tokens == len(plain)


def test_a_queue_that_cannot_start_is_no_prefill(checkpoint: Path) -> None:
    """Waiting requests cost nothing while every place is taken: the budget must not reckon with them."""
    engine = tiny_engine(checkpoint, vocab_size=VOCAB, engine={"max_running": 4})
    for item in greedy_requests(12):
        engine.add_request(item)
    engine.step()
    assert engine.stats().num_waiting == 8
    assert engine.admission.pending_prefill_rows() == 0
    engine.abort("0")
    assert engine.admission.pending_prefill_rows() == len(prompts(5)[4])


def test_what_can_never_run_is_refused(checkpoint: Path) -> None:
    engine = tiny_engine(checkpoint, vocab_size=VOCAB, engine={"max_waiting": 2})
    with pytest.raises(RequestError, match="exceed"):
        engine.add_request(request("long", [1] * 100, max_tokens=29))
    with pytest.raises(RequestError, match="empty"):
        engine.add_request(request("none", [], max_tokens=10))
    for index in range(2):
        engine.add_request(request(str(index), [1], max_tokens=1))
    with pytest.raises(QueueFullError):
        engine.add_request(request("3", [1], max_tokens=1))
    run_to_end(engine)
    check_empty(engine)


def test_the_models_last_position_can_be_used(checkpoint: Path) -> None:
    engine = tiny_engine(checkpoint, vocab_size=VOCAB)
    texts = run(engine, [request("0", prompts(1)[0], temperature=0.0, max_tokens=128 - len(prompts(1)[0]))])
    assert len(texts["0"]) == 128 - len(prompts(1)[0])
    check_empty(engine)


@pytest.mark.parametrize("temperature", [1e-6, 1e-45, 5e-324])
def test_a_vanishing_temperature_is_greedy(checkpoint: Path, temperature: float) -> None:
    engine = tiny_engine(checkpoint, vocab_size=VOCAB)
    item = request("0", prompts(1)[0], temperature=temperature, max_tokens=24)
    assert run(engine, [item])["0"] == plain_texts()["0"]


@pytest.mark.parametrize("leaves_one", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_filters_that_leave_one_token_are_greedy(checkpoint: Path, leaves_one: dict[str, Any]) -> None:
    engine = tiny_engine(checkpoint, vocab_size=VOCAB)
    asked = prompts(8)
    greedy = run(engine, [request(str(i), p, temperature=0.0) for i, p in enumerate(asked)])
    sampled = [request(str(i), p, temperature=1.5, **leaves_one) for i, p in enumerate(asked)]
    assert run(engine, sampled) == greedy
    assert engine.counters.accepted_tokens > 0


def test_noise_differs_by_seed_choice_and_prompt(checkpoint: Path) -> None:
    engine = tiny_engine(checkpoint, vocab_size=VOCAB)
    sampling = {"temperature": 50.0, "max_tokens": 30}  # almost uniform: what is drawn is the noise
    texts = run(
        engine,
        [
            request("first", [1, 2], seed=5, **sampling),
            request("again", [1, 2], seed=5, **sampling),
            request("seed", [1, 2], seed=6, **sampling),
            request("choice", [1, 2], seed=5, choice=1, **sampling),
            request("prompt", [1, 3], seed=5, **sampling),
        ],
    )
    assert texts["first"] == texts["again"]
    assert len({tuple(text) for text in texts.values()}) == 4


def test_a_plan_caps_the_draft_tokens_until_it_expires(checkpoint: Path) -> None:
    engine = tiny_engine(checkpoint, vocab_size=VOCAB, table=None)
    engine.apply_plan(StepPlan("r", 1, 1, "shared_cap", draft_tokens_per_s=8.0, ttl_ms=1000.0))
    for item in greedy_requests(8, max_tokens=60):
        engine.add_request(item)
    clock: Any = engine._clock
    verified = []
    for _ in range(10):
        before = engine.counters.verified_tokens
        engine.step()
        verified.append(engine.counters.verified_tokens - before)
        clock.advance(50.0)
    assert sum(verified) <= 4 + 8 * 0.5  # one block's credit, and half a second of the rate
    assert engine.stats().plan_age_ms is not None
    clock.advance(1000.0)
    assert engine.stats().plan_age_ms is None
    before = engine.counters.verified_tokens
    engine.step()
    assert engine.counters.verified_tokens - before == 8 * 4


def test_an_older_plan_is_dropped(checkpoint: Path) -> None:
    engine = tiny_engine(checkpoint, vocab_size=VOCAB)
    engine.apply_plan(StepPlan("r", 1, 5, "shared_cap", draft_tokens_per_s=8.0))
    engine.apply_plan(StepPlan("r", 1, 4, "shared_cap", draft_tokens_per_s=99.0))
    assert engine.budget.bucket is not None
    assert engine.budget.bucket.rate_per_s == 8.0


def test_reports_carry_old_scores_only(checkpoint: Path) -> None:
    engine = tiny_engine(checkpoint, vocab_size=VOCAB)
    for item in greedy_requests(4):
        engine.add_request(item)
    engine.step()
    assert engine.make_report("r", 1, 1, include_table=True).survival.shape == (0, 4)
    for _ in range(4):
        engine.step()
    report = engine.make_report("r", 1, 2, include_table=True)
    newest = [s.draft.survival for s in engine.admission.running if s.draft is not None]
    assert report.survival.shape == (4, 4)
    assert not any(np.array_equal(row, new) for row, new in zip(report.survival, newest, strict=True))
    assert report.table is not None


def test_the_checkpoint_is_what_the_engine_describes(checkpoint: Path) -> None:
    config, _ = load_checkpoint(checkpoint)
    described = tiny_engine(checkpoint, vocab_size=VOCAB).describe()
    assert str(config.draft_vocab_size) in described["drafter"]
    assert "verify ms" in described["step_table"]


def test_a_request_says_how_much_of_it_is_drafted(checkpoint: Path) -> None:
    """At most so many tokens of a block are verified; at 0 nothing is drafted. The text is the same."""
    engine = tiny_engine(checkpoint, vocab_size=VOCAB)
    limits = (None, 2, 0)
    items = [
        request(str(limit), prompts(1)[0], temperature=0.0, max_tokens=24, max_draft_tokens=limit)
        for limit in limits
    ]
    usages = {}
    texts: dict[str, list[int]] = {item.request_id: [] for item in items}
    for item in items:
        engine.add_request(item)
    while engine.has_work():
        outputs = engine.step()
        collect(outputs, texts)
        usages |= {o.request_id: o.usage for o in outputs if o.usage is not None}
    assert texts["None"] == texts["2"] == texts["0"]
    assert usages["0"].drafted_tokens == 0
    assert 0 < usages["2"].verified_tokens <= 2 * 24
    assert engine.counters.verified_per_position[2] > 0
    alone = tiny_engine(checkpoint, vocab_size=VOCAB)
    run(alone, [items[1]])
    assert alone.counters.verified_per_position[1] > alone.counters.verified_per_position[2] == 0


def test_the_queue_is_timed() -> None:
    engine = tiny_engine(None, speculation={"mode": "off"}, engine={"max_running": 1})
    clock: Any = engine._clock
    waits = {}
    for name in ("first", "second"):
        engine.add_request(request(name, [1, 2, 3], temperature=0.0, max_tokens=3))
    while engine.has_work():
        clock.advance(10.0)
        for output in engine.step():
            if output.usage is not None:
                waits[output.request_id] = output.usage.queue_ms
    assert waits == {"first": 10.0, "second": 40.0}
