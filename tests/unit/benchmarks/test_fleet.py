"""The pure parts of the fleet's measurements: what counts as wrong, recovered, growing, and the loads."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "fleet"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psutil")
    monkeypatch.syspath_prepend(str(FOLDER))


def test_a_token_lost_sent_twice_or_missing_at_the_end_shows() -> None:
    from streams import TimedTexts

    texts = TimedTexts("".join(chr(48 + k) for k in range(64)), max_tokens=100)
    whole = "".join(texts.characters[(7 + i) % 64] for i in range(100))
    assert texts.fault_of("", whole, 7) == ""
    assert "from 30" in texts.fault_of("", whole[:30] + whole[31:], 7)
    assert "from 31" in texts.fault_of("", whole[:31] + whole[30:], 7)
    assert "from 99" in texts.fault_of("", whole[:99], 7)
    assert texts.fault_of("", whole[:10] + whole[10:74] + whole[10:], 7)  # a whole period too many
    assert texts.fault_of("", whole, 8)
    assert texts.gap_in("", "") == texts.gap_in("", whole[:55]) == ""
    assert texts.gap_in("", whole[:20] + whole[21:40])
    assert texts.gap_in("", "not of ours")


def test_known_texts_are_compared_from_their_beginning() -> None:
    from streams import KnownTexts

    texts = KnownTexts({"p": "once upon"})
    assert texts.gap_in("p", "once") == texts.fault_of("p", "once upon", 3) == ""
    assert texts.gap_in("p", "nce")
    assert "from 4" in texts.fault_of("p", "once", 3)


def test_recovery_is_the_first_normal_window_after_a_dip() -> None:
    from streams import Tally

    marks = [(t / 10, 1) for t in range(100) if not 50 <= t < 70]  # nothing from 5 s to 7 s
    tally = Tally(marks=marks)
    assert tally.tokens_per_s(0.0, 5.0) == pytest.approx(10.0)
    assert tally.back_after_s(5.0, 10.0, 10.0) == pytest.approx(1.9, abs=0.15)
    assert tally.back_after_s(3.0, 10.0, 10.0) == pytest.approx(3.9, abs=0.15)  # the dip comes later
    assert tally.back_after_s(7.0, 10.0, 10.0) == 0.0
    assert tally.back_after_s(7.0, 14.0, 10.0) is None  # the clients had left
    assert tally.back_after_s(5.0, 10.0, 20.0) is None


def test_the_slope_of_memory_ignores_a_few_odd_notes() -> None:
    from soak import slope

    times = np.arange(60.0)
    assert slope(2.0 * times + 5.0, times) == pytest.approx(2.0)
    odd = np.full(60, 7.0)
    odd[[3, 40]] = 1e6
    assert slope(odd, times) == 0.0


def test_the_soak_asks_for_every_kind_of_answer() -> None:
    from soak import draw

    rng = np.random.default_rng(0)
    asked = [draw(rng, "m") for _ in range(400)]
    assert {one.route for one in asked} == {"/v1/completions", "/v1/chat/completions"}
    assert any(one.is_wrong for one in asked)
    assert any(one.leave_after == 0.0 for one in asked)
    for key in ("seed", "stop", "n", "min_p", "response_format", "logprobs"):
        assert any(key in one.body for one in asked), key


def test_the_load_of_the_autoscaler_rises_and_falls() -> None:
    from autoscale import HIGH, LOW, arrivals, offered

    sent = arrivals(200.0, np.random.default_rng(1))
    times = [one.at_s for one in sent]
    assert all(a < b for a, b in pairwise(times))
    assert (offered(0.0, 200.0), offered(100.0, 200.0), offered(200.0, 200.0)) == (LOW, HIGH, LOW)
    middle = sum(90 <= at < 110 for at in times)
    assert middle > 3 * sum(at >= 180 for at in times)


def test_talks_go_on_from_where_they_were() -> None:
    from routers import TURNS, conversations

    sent = conversations(40.0, 3.0, seed=0)
    assert [one.at_s for one in sent] == [one.at_s for one in conversations(40.0, 3.0, seed=0)]
    by_talk: dict[str, list[str]] = {}
    for one in sent:
        text = str(one.prompt.text)
        by_talk.setdefault(text.split()[1], []).append(text)
    assert max(len(turns) for turns in by_talk.values()) <= TURNS
    assert all(b.startswith(a) for turns in by_talk.values() for a, b in pairwise(turns))


def test_every_fault_is_named_once_and_pairs_are_complete() -> None:
    from faults import HOLD_CONNECTIONS, NATIVE_CASES, TITLES, cases, table

    found = cases()
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    assert sum(" + " in name for name in names) == len(TITLES) * (len(TITLES) - 1) // 2
    for case in found:
        parts = set(case.name.split(" + "))
        if parts <= set(TITLES):
            assert case.may_lose == bool(parts & HOLD_CONNECTIONS)
    assert set(NATIVE_CASES) <= set(names)
    row = {"fault": "engine", "lost": {"ReadError": 2}, "left": {}, "back_s": None, "passed": False}
    assert table([row]).splitlines()[2].startswith("| engine | ")
    assert "2 ReadError" in table([row])
