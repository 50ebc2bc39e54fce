"""A drafter is swapped while requests run: no text changes, and the new one reads no context but its own."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark_ray.calibration.temperatures import Temperatures
from dspark_ray.core.clock import ManualClock
from dspark_ray.core.errors import RequestError
from dspark_ray.core.types import AcceptanceRule, Request, SwapOrder
from dspark_ray.engine.build import build_candidate
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.hot_swap import HotSwap
from dspark_ray.engine.trial import FIRST_LOOK, LAST_LOOK, DrafterTrial, Verdict
from dspark_ray.models.drafters.base import ContextRows, DraftBlock, DraftRequest, Outcome
from dspark_ray.models.drafters.confidence import drafter_digest
from tests.tiny_engine import STEEP_TABLE, collect, request, run, tiny_drafter_dir, tiny_engine

VOCAB = 24
LENGTH = 24


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafters")
    return {
        "old": tiny_drafter_dir(folder / "old", VOCAB, draft_vocab=range(0, VOCAB, 2), seed=1),
        "new": tiny_drafter_dir(folder / "new", VOCAB, draft_vocab=range(0, VOCAB, 2), seed=2),
        "whole": tiny_drafter_dir(folder / "whole", VOCAB, draft_vocab=None, seed=3),
    }


def requests(count: int = 12, **sampling: Any) -> list[Request]:
    rng = np.random.default_rng(0)
    return [
        request(
            str(i), rng.integers(0, VOCAB, 13).tolist(), max_tokens=LENGTH, **{"temperature": 0.0, **sampling}
        )
        for i in range(count)
    ]


def engine_of(checkpoint: Path | None, mode: str = "fixed", **sections: Any) -> Engine:
    speculation = {"mode": mode, "drafter": {"kind": "dspark", "path": str(checkpoint)}}
    if checkpoint is None:
        speculation = {"mode": "off"}
    engine = tiny_engine(checkpoint, vocab_size=VOCAB, speculation=speculation, **sections)
    engine.hot_swap = HotSwap(
        engine,
        lambda order: build_candidate(engine.config, engine.target, order),
        VOCAB,
        ManualClock(),
    )
    return engine


def swap_of(engine: Engine) -> HotSwap:
    assert engine.hot_swap is not None
    return engine.hot_swap


def swap(engine: Engine, path: Path, share: float = 0.5, **order: Any) -> None:
    """The trial begins, and waits for what the test does."""
    hot_swap = swap_of(engine)
    hot_swap.start(hot_swap.build(SwapOrder(str(path), share=share, automatic=False, **order)))


@pytest.mark.parametrize("candidate", ["new", "whole"])
@pytest.mark.parametrize("mode", ["fixed", "adaptive"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
def test_texts_stay_through_trial_promotion_and_roll_back(
    checkpoints: dict[str, Path], mode: str, candidate: str, sampling: dict[str, Any]
) -> None:
    """The vocabularies of the two drafters may differ."""
    plain = run(engine_of(None), requests(**sampling))
    engine = engine_of(checkpoints["old"], mode)
    texts: dict[str, list[int]] = {item.request_id: [] for item in requests()}
    for item in requests(**sampling):
        engine.add_request(item)
    for step in range(1000):
        if step == 3:
            swap(engine, checkpoints[candidate])
        if step == 8:
            swap_of(engine).roll_back("the test wants it")
        if step == 9:
            swap(engine, checkpoints[candidate])
        if step == 13:
            swap_of(engine).promote("the test wants it")
        if not engine.has_work():
            break
        collect(engine.step(), texts)
    assert texts == plain
    counters = engine.counters
    assert counters.drafted_tokens == counters.verified_tokens + counters.trimmed_tokens
    assert counters.accepted_tokens > 0
    assert swap_of(engine).state.status == "promoted"
    assert engine.pool.num_used == 0


def test_both_draft_their_share(checkpoints: dict[str, Path]) -> None:
    engine = engine_of(checkpoints["old"])
    swap(engine, checkpoints["new"], share=0.25)
    assert [(arm.num_drafts, arm.error) for arm in swap_of(engine).state.arms] == [(0, None)] * 2
    json.dumps(asdict(swap_of(engine).state), allow_nan=False)  # what routes answer at once
    run(engine, requests(64))
    swap_of(engine).refresh()
    old, new = swap_of(engine).state.arms
    assert new.num_drafts > 0
    assert 0.15 < new.num_drafts / (old.num_drafts + new.num_drafts) < 0.35
    assert min(new.tau, old.tau) >= 1.0


class Blindfold:
    """A drafter that is told that its context begins at a position, whatever it has."""

    def __init__(self, inner: Any, first: int) -> None:
        self._inner, self._first = inner, first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def propose(self, requests: Sequence[DraftRequest]) -> DraftBlock:
        (digest,) = self._inner.context_digests
        return self._inner.propose([replace(r, context_from={digest: self._first}) for r in requests])


def course_of(engine: Engine, item: Request) -> tuple[float, list[tuple[list[int], list[float]]]]:
    """τ, and every draft with its chances."""
    steps, tokens = engine.counters.request_steps, engine.counters.decode_tokens
    drafts = []
    engine.add_request(item)
    while engine.has_work():
        engine.step()
        for sequence in engine.admission.running:
            if sequence.draft is not None:
                drafts.append((sequence.draft.token_ids, sequence.draft.survival.round(4).tolist()))
    counters = engine.counters
    return (counters.decode_tokens - tokens) / (counters.request_steps - steps), drafts


def test_after_a_swap_the_target_half_hits_and_drafting_starts_cold(checkpoints: dict[str, Path]) -> None:
    """As if the new drafter had never seen the cached tokens: neither its own stale context nor the old one's
    is read."""
    item = request("long", [(7 * i) % VOCAB for i in range(41)], max_tokens=40, temperature=0.0)
    cached = 40  # whole blocks of 4
    cold = engine_of(checkpoints["new"], engine={"prefix_cache": False})
    cold.drafter = Blindfold(cold.drafter, cached)
    expected = course_of(cold, item)
    warm = course_of(engine_of(checkpoints["new"]), item)
    assert warm != expected, "the context must matter, or this test shows nothing"

    engine = engine_of(checkpoints["old"])
    run(engine, [item])
    swap(engine, checkpoints["new"])
    swap_of(engine).promote("the test wants it")
    assert engine.drafter is not None
    for cache in (engine.drafter.backbone.kv.k, engine.drafter.backbone.kv.v):  # type: ignore[attr-defined]
        cache.fill_(1e3)
    hits = engine.stats().prefix_hit_tokens
    assert course_of(engine, item) == expected
    assert engine.stats().prefix_hit_tokens - hits == cached


def test_context_is_stored_again_behind_a_cold_start(checkpoints: dict[str, Path]) -> None:
    engine = engine_of(checkpoints["old"])
    old, new = drafter_digest(checkpoints["old"]), drafter_digest(checkpoints["new"])
    item = requests(1)[0]
    run(engine, [item])
    swap(engine, checkpoints["new"])
    engine.add_request(item)
    engine.step()
    (sequence,) = engine.admission.running
    assert sequence.context_from == {old: 0, new: 12}
    swap_of(engine).promote("the test wants it")
    assert sequence.context_from == {new: 12}
    while engine.has_work():
        engine.step()
    longer = request("longer", sequence.token_ids, max_tokens=2, temperature=0.0)
    engine.add_request(longer)
    engine.step()
    assert engine.admission.running[0].context_from == {new: 12}  # its later blocks are whole


def test_new_temperatures_share_network_and_context(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    engine = engine_of(checkpoints["old"], "adaptive")
    made_from = {"drafter": drafter_digest(checkpoints["old"])}
    neutral = Temperatures.neutral(4)
    sharp = {rule: np.full(4, 0.25) for rule in AcceptanceRule}
    path = tmp_path / "sharp.json"
    replace(neutral, by_rule={**sharp}, made_from=made_from).save(path)
    item = requests(1)[0]
    run(engine, [item])
    hot_swap = swap_of(engine)
    hot_swap.start(hot_swap.build(SwapOrder(None, str(path), share=0.5, automatic=False)))
    hot_swap.promote("the test wants it")
    engine.add_request(item)
    engine.step()
    assert set(engine.admission.running[0].context_from.values()) == {0}  # nothing is cold
    with pytest.raises(RequestError, match="drafter"):
        hot_swap.build(SwapOrder(None, str(checkpoints["new"] / "config.json")))


def test_what_cannot_be_swapped(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    engine = engine_of(checkpoints["old"])
    hot_swap = swap_of(engine)
    other = tiny_drafter_dir(tmp_path / "other", VOCAB + 2, draft_vocab=None)
    for order, message in (
        (SwapOrder(str(tmp_path / "nowhere")), "nowhere"),
        (SwapOrder(str(other)), "vocab_size is 26"),
        (SwapOrder(str(checkpoints["old"])), "serves already"),
        (SwapOrder(str(checkpoints["new"]), kind="ngram"), "no checkpoint"),
        (SwapOrder(None), "name a drafter or temperatures"),
    ):
        with pytest.raises(RequestError, match=message):
            hot_swap.build(order)
    with pytest.raises(RequestError, match="no drafter is being tried"):
        hot_swap.promote("nothing is there")
    swap(engine, checkpoints["new"])
    with pytest.raises(RequestError, match="tried already"):
        hot_swap.build(SwapOrder(str(checkpoints["whole"])))
    with pytest.raises(RequestError, match="no drafter"):
        swap_of(engine_of(None)).build(SwapOrder(str(checkpoints["new"])))


class Scripted:
    """Takes its time for a block, of which each token is accepted with one probability."""

    num_draft_tokens = 4
    taps: tuple[int, ...] = ()
    vocab_map = None

    def __init__(self, name: str, clock: ManualClock, draft_ms: float) -> None:
        self.context_digests = (name,)
        self._clock, self._draft_ms = clock, draft_ms

    def commit(self, rows: ContextRows) -> None: ...

    def observe(self, outcomes: Sequence[Outcome]) -> None: ...

    def wants_full_verification(self) -> bool:
        return False

    def describe(self) -> str:
        return "scripted"

    def propose(self, requests: Sequence[DraftRequest]) -> DraftBlock:
        self._clock.advance(self._draft_ms)
        width = len(requests[0].uniforms)
        chances = np.full((len(requests), width), 0.5, dtype=np.float32)
        return DraftBlock([[0] * width for _ in requests], chances, [None] * len(requests))


def verdict_of(rates: tuple[float, float], draft_ms: tuple[float, float], share: float = 0.2) -> Verdict:
    """Of drafters whose tokens are accepted at these rates; 16 requests in every step."""
    clock, rng = ManualClock(), np.random.default_rng(5)
    arms = [Scripted(name, clock, ms) for name, ms in zip("ab", draft_ms, strict=True)]
    trial = DrafterTrial(arms[0], arms[1], share, STEEP_TABLE, VOCAB, clock)
    rows = ContextRows(torch.zeros(16, 0), torch.zeros(16), torch.zeros(16), torch.zeros(16))
    items = [
        DraftRequest([1, 2], [0], requests(1)[0].sampling, np.zeros(4), number=number) for number in range(16)
    ]
    for _ in range(LAST_LOOK):
        trial.commit(rows)
        block = trial.propose(items)
        assert block.notes is not None
        outcomes = []
        for note in block.notes:
            misses = np.flatnonzero(rng.random(4) >= rates[note.arm])  # type: ignore[attr-defined]
            outcomes.append(Outcome(4, int(misses[0]) if len(misses) else 4, note=note))
        trial.observe(outcomes)
        if (verdict := trial.look()) is not Verdict.UNDECIDED:
            return verdict
    return Verdict.UNDECIDED


def test_accepted_length_and_step_cost_decide() -> None:
    same = (0.13, 0.13)
    assert verdict_of((0.5, 0.7), same) is Verdict.BETTER
    assert verdict_of((0.7, 0.5), same) is Verdict.WORSE
    assert verdict_of((0.6, 0.6), same) is Verdict.NO_BETTER
    assert verdict_of((0.6, 0.6), (0.13, 30.0)) is Verdict.WORSE  # as good, and dear
    assert verdict_of((0.6, 0.6), (30.0, 0.13)) is Verdict.BETTER
    assert FIRST_LOOK < LAST_LOOK


def test_an_automatic_trial_ends_by_itself(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(checkpoints["old"])
    hot_swap = swap_of(engine)
    for verdict, status in ((Verdict.WORSE, "rolled_back"), (Verdict.BETTER, "promoted")):
        before = engine.drafter
        hot_swap.start(hot_swap.build(SwapOrder(str(checkpoints["new"]))))
        monkeypatch.setattr(DrafterTrial, "look", lambda self, verdict=verdict: verdict)
        run(engine, requests(1))
        assert hot_swap.state.status == status
        assert (engine.drafter is before) == (status == "rolled_back")
