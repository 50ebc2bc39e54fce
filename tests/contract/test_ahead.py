"""Steps launched before the one that runs is read: the same texts, and the device is never waited for."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark_ray.core.config import parse_app_config
from dspark_ray.core.errors import ConfigError
from dspark_ray.core.types import Request, StepPlan, TierTerms
from dspark_ray.engine.ahead import Ahead, goes_ahead
from dspark_ray.engine.device_step import Launched
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.graphs import GraphedTarget
from dspark_ray.scheduling.speculation import Blocks
from tests.far_device import far_device, host_waits
from tests.tiny_engine import (
    collect,
    request,
    run,
    steep_table,
    tiny_decoder,
    tiny_drafter_dir,
    tiny_engine,
)

VOCAB = 24
EOS = 5
RULES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 1.3, "seed": 3, "top_p": 0.9, "top_k": 12, "min_p": 0.02},
    {"temperature": 0.0, "stop_token_ids": (11, 17)},
    {"temperature": 0.7, "seed": 7, "max_draft_tokens": 2},
)
LENGTHS = (3, 26, 40, 17, 1, 33)


@pytest.fixture(scope="module", params=[None, range(0, VOCAB, 2)], ids=["whole", "reduced"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drafter_dir(tmp_path_factory.mktemp("drafter"), VOCAB, draft_vocab=request.param)


def requests(count: int = 24) -> list[Request]:
    """Of every rule and length; prompts of a few blocks that share a beginning."""
    rng = np.random.default_rng(3)
    return [
        request(
            f"r{i}",
            [1, 8, 2, 9, 4, *rng.integers(0, VOCAB, 1 + i % 9)],
            max_tokens=LENGTHS[i * 7 % 5 if i % 2 else i % len(LENGTHS)],
            **RULES[i % len(RULES)],
        )
        for i in range(count)
    ]


def engine_of(checkpoint: Path | None, ahead: str = "on", **sections: dict[str, Any]) -> Engine:
    sections.setdefault("speculation", {"mode": "adaptive"})
    sections["engine"] = {"max_running": 12, "ahead": ahead} | sections.get("engine", {})
    table = steep_table(16)
    return tiny_engine(checkpoint, vocab_size=VOCAB, table=table, eos_token_ids=(EOS,), **sections)


@pytest.fixture(scope="module")
def plain() -> dict[str, list[int]]:
    return run(engine_of(None, "off", speculation={"mode": "off"}), requests())


def run_in_waves(engine: Engine, items: Sequence[Request], every: int = 4) -> tuple[dict, set[int]]:
    """Some at once, and another two whenever so many steps have passed; texts and budgets."""
    texts: dict[str, list[int]] = {item.request_id: [] for item in items}
    waiting, budgets = list(items), set()
    for step in itertools.count():
        for item in [waiting.pop(0) for _ in range(10 if step == 0 else 2 * (step % every == 0)) if waiting]:
            engine.add_request(item)
        if not engine.has_work():
            break
        collect(engine.step(), texts)
        budgets |= {record.budget_tokens for record in engine.recent_steps()[-1:]}
    return texts, budgets


def check_books(engine: Engine) -> None:
    counters = engine.counters
    assert counters.drafted_tokens == counters.verified_tokens + counters.trimmed_tokens
    assert counters.verified_tokens == counters.accepted_tokens + counters.rejected_tokens
    assert engine.pool.num_used == 0
    assert engine.ahead is not None
    assert engine.ahead.finish() == []


@pytest.mark.parametrize("graphs", [False, True], ids=["as it is", "captured"])
@pytest.mark.parametrize("mode", ["off", "fixed", "adaptive"])
def test_texts_are_those_of_plain_decoding(checkpoint: Path, plain: dict, mode: str, graphs: bool) -> None:
    """With arrivals and ends between, several budgets and drafts trimmed."""
    from tests.contract.test_graphs import RerunCapturer

    engine = engine_of(checkpoint, speculation={"mode": mode})
    if graphs:
        capturer = RerunCapturer()
        engine.graphs = GraphedTarget(engine.config, engine.target, engine.kv, capturer)
        if engine.drafter is not None:
            engine.drafter.use_graphs(capturer, engine.config.engine.max_running)
    texts, budgets = run_in_waves(engine, requests())
    assert texts == plain
    check_books(engine)
    assert engine.ahead.num_launched >= engine.counters.target_steps
    if graphs:
        assert capturer.replays > 0.4 * engine.counters.target_steps  # those without prompts
    if mode != "off":
        assert engine.counters.accepted_tokens > 0
        assert engine.counters.trimmed_tokens > 0
    if mode == "adaptive":
        assert len(budgets) > 3


def test_drawn_texts_in_a_batch_of_all_rules_end_as_they_should(checkpoint: Path, plain: dict) -> None:
    """And leave those beside them alone."""
    drawn = [request(f"d{i}", [i], temperature=0.8, top_p=0.95, max_tokens=20) for i in range(3)]
    engine = engine_of(checkpoint, speculation={"mode": "fixed"}, engine={"max_running": 27})
    texts = run(engine, [*requests(), *drawn])
    for item in drawn:
        text = texts.pop(item.request_id)
        assert len(text) == 20 or text[-1] == EOS
    assert texts == plain
    check_books(engine)


@pytest.mark.parametrize("mode", ["off", "fixed", "adaptive"])
def test_scarce_blocks_change_no_text(checkpoint: Path, plain: dict, mode: str) -> None:
    engine = engine_of(
        checkpoint,
        speculation={"mode": mode},
        model={"max_model_len": 64},
        engine={"kv_num_blocks": 30, "max_running": 12},
    )
    texts, _ = run_in_waves(engine, requests())
    assert texts == plain
    assert engine.stats().num_preemptions > 0
    assert engine.ahead.num_launched > 10
    check_books(engine)


def test_aborts_at_any_moment(checkpoint: Path, plain: dict) -> None:
    """Between two calls a launched step is unread: what it says of who has gone is dropped, and who comes
    under the same name is somebody else."""
    for moment in (1, 2, 3, 5, 9):
        engine = engine_of(checkpoint, speculation={"mode": "fixed"})
        items = requests(8)
        texts: dict[str, list[int]] = {item.request_id: [] for item in items}
        for item in items:
            engine.add_request(item)
        for _ in range(moment):
            collect(engine.step(), texts)
        gone = [item for item in items[1:4] if engine.abort(item.request_id)]
        for item in gone:
            texts[item.request_id].clear()
            engine.add_request(item)
        while engine.has_work():
            collect(engine.step(), texts)
        assert texts == {name: plain[name] for name in texts}
        check_books(engine)


def test_an_engine_without_requests_forgets_what_runs(checkpoint: Path, plain: dict) -> None:
    engine = engine_of(checkpoint)
    items = requests(4)
    for item in items:
        engine.add_request(item)
    for _ in range(4):
        engine.step()
    for item in items:
        engine.abort(item.request_id)
    assert not engine.has_work()
    assert engine.pool.num_used == 0
    assert run(engine, items) == {item.request_id: plain[item.request_id] for item in items}
    check_books(engine)


def test_drafts_made_ahead_are_the_drafters_own(checkpoint: Path) -> None:
    """The context of accepted rows, and of no others, is there when the next block is drafted."""
    engine = engine_of(checkpoint, speculation={"mode": "fixed"})
    item = request("a", [3, 1, 4, 1, 5, 9, 2], temperature=0.0, max_tokens=60, ignore_eos=True)
    engine.add_request(item)
    for step in range(9):
        engine.step()
        (sequence,) = engine.admission.running
        fresh = engine_of(checkpoint, "off", speculation={"mode": "fixed"})
        fresh.add_request(request("a", sequence.token_ids[:-1], temperature=0.0, max_tokens=50))
        fresh.step()
        (other,) = fresh.admission.running
        assert other.token_ids == sequence.token_ids
        assert other.draft is not None
        assert sequence.draft is not None
        assert other.draft.token_ids == sequence.draft.token_ids
        np.testing.assert_allclose(other.draft.survival, sequence.draft.survival, rtol=1e-4)
        assert engine.ahead.num_launched >= step
    assert engine.counters.accepted_tokens > 0


# -- when ------------------------------------------------------------------------------------------------


def test_it_is_on_where_the_target_is_on_a_device() -> None:
    near, elsewhere = tiny_decoder(VOCAB), tiny_decoder(VOCAB)
    elsewhere.device = torch.device("meta")
    for wanted, here, there in (("auto", False, True), ("on", True, True), ("off", False, False)):
        config = parse_app_config({"engine": {"ahead": wanted}})
        assert goes_ahead(config, near) == here
        assert goes_ahead(config, elsewhere) == there
    elsewhere.can_be_captured = False  # ranks are told of each pass
    assert not goes_ahead(parse_app_config({}), elsewhere)
    with pytest.raises(ConfigError):
        parse_app_config({"engine": {"ahead": "sometimes"}})


NEEDS_HOST = {
    "rules": {"frequency_penalty": 0.3},
    "log-probabilities": {"logprobs": 2},
}


@pytest.mark.parametrize("why", NEEDS_HOST)
def test_requests_that_need_the_host_are_stepped_one_by_one(checkpoint: Path, plain: dict, why: str) -> None:
    """And the others go ahead again when they have left."""
    engine = engine_of(checkpoint)
    needy = request("needy", [2, 2], temperature=0.0, max_tokens=8, ignore_eos=True, **NEEDS_HOST[why])
    items = requests(6)
    texts: dict[str, list[int]] = {item.request_id: [] for item in (*items, needy)}
    for item in items:
        engine.add_request(item)
    for _ in range(5):
        collect(engine.step(), texts)
    launched = engine.ahead.num_launched
    assert launched > 0
    engine.add_request(needy)
    collect(engine.step(), texts)
    collect(engine.step(), texts)
    assert why in engine.ahead.why_not()
    while len(texts["needy"]) < 8:
        collect(engine.step(), texts)
    assert engine.ahead.num_launched == launched
    while engine.has_work():
        collect(engine.step(), texts)
    assert engine.ahead.num_launched > launched
    del texts["needy"]
    assert texts == {name: plain[name] for name in texts}
    check_books(engine)


@pytest.mark.parametrize(
    ("speculation", "why"),
    [
        ({"mode": "threshold"}, "scores"),
        ({"mode": "algorithm1"}, "scores"),
        ({"mode": "fixed", "confidence": "online"}, "drafter"),
    ],
)
def test_what_no_step_can_do_ahead(checkpoint: Path, plain: dict, speculation: dict, why: str) -> None:
    engine = engine_of(checkpoint, speculation=speculation)
    assert why in engine.ahead.why_not()
    assert run(engine, requests()) == plain
    assert engine.ahead.num_launched == 0


def test_tiers_are_chosen_by_the_scores_at_hand(checkpoint: Path) -> None:
    engine = engine_of(checkpoint)
    assert engine.ahead.why_not() == ""
    terms = (TierTerms(1.0, None),) * 3
    engine.apply_plan(StepPlan("r", 1, 1, "weights", tiers=terms, ttl_ms=1000.0))
    assert "scores" in engine.ahead.why_not()


def test_a_cap_binds(checkpoint: Path) -> None:
    engine = engine_of(checkpoint, speculation={"mode": "fixed"}, engine={"max_running": 8})
    engine.apply_plan(StepPlan("r", 1, 1, "shared_cap", draft_tokens_per_s=8.0, ttl_ms=1e6))
    for item in requests(8):
        engine.add_request(item)
    for _ in range(10):
        engine.step()
        engine._clock.advance(50.0)
    assert engine.ahead.num_launched > 5
    assert 4 <= engine.counters.verified_tokens <= 4 + 8 * 0.5


# -- order -----------------------------------------------------------------------------------------------


def note_order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to launched steps, and what is waited for meanwhile."""
    events: list[str] = []

    def noted(owner: type, name: str, event: str) -> None:
        inner = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with host_waits() as waits:
                found = inner(*args, **kwargs)
            events.extend([*(f"wait in {event}" for _ in waits), event])
            return found

        monkeypatch.setattr(owner, name, call)

    noted(Ahead, "_decide", "prepare")
    noted(Ahead, "_run", "launch")
    noted(Launched, "read", "read")
    return events


@pytest.mark.parametrize("mode", ["off", "fixed", "adaptive"])
def test_a_step_is_prepared_and_launched_before_the_one_before_it_is_read(
    tmp_path: Path, plain: dict, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """On a device that only pretends to be one. Reading a step waits once; nothing else waits at all."""
    checkpoint = tiny_drafter_dir(tmp_path, VOCAB, draft_vocab=range(0, VOCAB, 2))
    with far_device() as device:
        target = tiny_decoder(VOCAB, device=device)
        engine = tiny_engine(
            checkpoint,
            vocab_size=VOCAB,
            table=steep_table(16),
            target=target,
            eos_token_ids=(EOS,),
            engine={"max_running": 12},
            speculation={"mode": mode},
        )
        drawn = [request(f"d{i}", [i], temperature=0.8, max_tokens=20) for i in range(2)]
        texts: dict[str, list[int]] = {}
        for item in (*requests(8), *drawn):
            engine.add_request(item)
            texts[item.request_id] = []
        events = note_order(monkeypatch)
        while engine.has_work():
            with host_waits() as waits:
                collect(engine.step(), texts)
            assert len(waits) <= 1
    assert {name: text for name, text in texts.items() if name in plain} == {
        item.request_id: plain[item.request_id] for item in requests(8)
    }
    assert events[:4] == ["prepare", "launch", "prepare", "launch"]
    read = launched = 0
    for event in events:
        launched += event == "launch"
        read += event == "read"
        # The next one is there when a step is read, but for the last: nobody is there for another.
        assert event != "read" or launched in (read + 1, events.count("launch"))
    assert launched > 15
    assert events.count("wait in read") == read
    assert {event for event in events if event.startswith("wait")} == {"wait in read"}


# -- losslessness ----------------------------------------------------------------------------------------


class Spy:
    """What budgets were searched with."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.searched: list[tuple[int, np.ndarray]] = []
        budget, inner = engine.budget, engine.budget.lengths

        def lengths(blocks: Blocks, *rest: Any, **more: Any) -> Any:
            self.searched.append((len(drafts), blocks.searched[0].copy()))
            return inner(blocks, *rest, **more)

        drafts = self.drafts = []  # scores in the order in which they were made
        run_step = engine.ahead._run

        def launch(*args: Any) -> Any:
            launched = run_step(*args)
            drafts.append(launched.standing.confidences[0].numpy().cumprod())
            return launched

        monkeypatch.setattr(budget, "lengths", lengths)
        monkeypatch.setattr(engine.ahead, "_run", launch)


def test_budgets_are_searched_over_scores_two_steps_old(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a request with the rejection rule, neither the block at hand's nor the one's before."""
    engine = engine_of(checkpoint, speculation={"mode": "adaptive"})
    engine.budget.wants_draft = lambda decoding, load: decoding  # type: ignore[method-assign]
    engine.add_request(request("a", [3, 1, 4], temperature=1.0, max_tokens=60, ignore_eos=True))
    spy = Spy(engine, monkeypatch)
    for _ in range(12):
        engine.step()
    made = spy.drafts
    known = 0
    for num_launched, stale in spy.searched:
        # The block at hand is the last of those launched, `made[num_launched - 1]`.
        ages = [
            num_launched - 1 - at
            for at, scores in enumerate(made[:num_launched])
            if np.allclose(scores, stale, atol=1e-5)
        ]
        known += bool(ages)
        assert all(age >= 2 for age in ages)
    assert known > 5
