"""Where requests go: marginal throughput, cached beginnings, waiting, and a few choices on stale loads."""

import random
from dataclasses import replace

import pytest

from dspark_ray.scheduling.load import ReplicaLoad
from dspark_ray.scheduling.router import CHUNK_TOKENS, Affinity, RoutedRequest, rank, score

FAST = ReplicaLoad(0, 0, 8, 10_000, ((1, 100.0), (4, 320.0), (8, 480.0)), 1.0)
SLOW = ReplicaLoad(0, 0, 8, 10_000, ((1, 40.0), (4, 120.0), (8, 180.0)), 3.0)
SHORT = RoutedRequest((1,) * 8, 64)
LONG = RoutedRequest(tuple(range(500)), 64)


def test_the_score_is_the_throughput_added() -> None:
    free = replace(FAST, prefill_ms_per_token=0.0)
    assert score(free, 0, SHORT, 0) == pytest.approx(100.0)
    assert score(free, 5, SHORT, 0) == pytest.approx(40.0)
    assert score(FAST, 0, SHORT, 0) < 100.0  # its prompt costs others


def test_a_fast_replica_takes_more_until_it_adds_less() -> None:
    """Greedy by the score is greedy by marginal throughput."""
    here = {"fast": 0, "slow": 0}
    rng = random.Random(0)
    for _ in range(10):
        first = rank({"fast": FAST, "slow": SLOW}, here, SHORT, {}, rng)[0]
        here[first] += 1
    assert here["fast"] > here["slow"] > 0


def test_who_must_wait_comes_after_who_need_not_and_longer_waits_last() -> None:
    full = score(FAST, 8, SHORT, 0)
    assert full < score(SLOW, 7, SHORT, 0)
    assert score(FAST, 20, SHORT, 0) < full < 0
    crowded = replace(FAST, free_tokens=10)
    assert score(crowded, 3, SHORT, 0) < 0


def test_full_replicas_are_told_apart_by_the_wait_itself() -> None:
    """Not by what it costs at their own speed: a slow replica's queue would grow without end."""
    loads = {"fast": FAST, "slow": SLOW}
    for fast, slow, first in ((9, 9, "fast"), (11, 9, "fast"), (9, 12, "fast"), (14, 9, "slow")):
        assert rank(loads, {"fast": fast, "slow": slow}, SHORT, {}, random.Random())[0] == first


def test_a_prompt_goes_where_it_is_prefilled_soonest() -> None:
    slow_prefill = replace(FAST, prefill_ms_per_token=4.0)
    loads = {"a": slow_prefill, "b": FAST}
    assert rank(loads, {"a": 0, "b": 1}, LONG, {}, random.Random())[0] == "b"
    assert rank(loads, {"a": 0, "b": 1}, SHORT, {}, random.Random())[0] == "a"


def test_cached_tokens_win_where_they_save_more_than_the_difference() -> None:
    equal = {"a": FAST, "b": FAST}
    for _ in range(5):
        assert rank(equal, {"a": 2, "b": 2}, LONG, {"b": 448}, random.Random())[0] == "b"
    assert score(FAST, 2, LONG, 448) > score(FAST, 0, LONG, 0)  # a few others are worth a long prefix
    assert score(FAST, 8, LONG, 448) < score(FAST, 0, LONG, 0)  # waiting is not


def test_beginnings_and_sessions_are_remembered_by_replica() -> None:
    affinity = Affinity()
    affinity.note(LONG, "a")
    longer = RoutedRequest((*LONG.prompt_token_ids, 7, 8), 64)
    assert affinity.cached_tokens(longer) == {"a": 500 // CHUNK_TOKENS * CHUNK_TOKENS}
    branched = RoutedRequest((*range(100), *[9] * 400), 64)
    assert affinity.cached_tokens(branched) == {"a": CHUNK_TOKENS}
    affinity.note(branched, "b")
    assert affinity.cached_tokens(LONG) == {"b": CHUNK_TOKENS, "a": 448}
    affinity.note(replace(SHORT, session_key="chat"), "c")
    assert affinity.cached_tokens(RoutedRequest((5,) * 20, 4, "chat")) == {"c": 8}
    assert affinity.cached_tokens(RoutedRequest((5,) * 20, 4, "other")) == {}


def test_what_is_remembered_is_bounded() -> None:
    affinity = Affinity(max_known=10)
    for number in range(50):
        affinity.note(RoutedRequest((number,) * CHUNK_TOKENS, 4, f"{number}"), "a")
    assert affinity.cached_tokens(RoutedRequest((0,) * CHUNK_TOKENS, 4)) == {}
    assert affinity.cached_tokens(RoutedRequest((49,) * CHUNK_TOKENS, 4)) == {"a": CHUNK_TOKENS}


def test_every_replica_is_ranked_known_or_not() -> None:
    rng = random.Random(1)
    names = [f"r{n}" for n in range(6)]
    for loads in (dict.fromkeys(names), {name: FAST if name == "r3" else None for name in names}):
        order = rank(loads, dict.fromkeys(names, 0), SHORT, {}, rng)
        assert sorted(order) == names
    assert rank({}, {}, SHORT, {}, rng) == []
    assert rank({"a": None, "b": None}, {"a": 3, "b": 1}, SHORT, {}, rng) == ["b", "a"]


def test_stale_loads_do_not_send_everybody_to_one_replica() -> None:
    rng, names = random.Random(2), [f"r{n}" for n in range(10)]
    loads = dict.fromkeys(names, FAST)
    here = {name: 1 if name == "r0" else 3 for name in names}  # r0 looks best, and stays so
    first = [rank(loads, here, SHORT, {}, rng)[0] for _ in range(400)]
    assert 110 < first.count("r0") < 210  # four of ten choices, not all


def test_a_slow_replica_is_not_the_better_of_a_bad_pair() -> None:
    rng = random.Random(3)
    loads = {"slow": SLOW, "busy": FAST, "idle": FAST}
    here = {"slow": 0, "busy": 6, "idle": 0}
    assert {rank(loads, here, SHORT, {}, rng)[0] for _ in range(50)} == {"idle"}


@pytest.mark.parametrize("here", [1, 20])
def test_a_replica_that_knows_no_rates_yet_counts_as_one_that_does(here: int) -> None:
    """Else it scores 0: below every free replica, and above every full one however long its own queue."""
    loads = {"known": FAST, "new": replace(FAST, rates=(), prefill_ms_per_token=0.0)}
    assert rank(loads, {"known": here, "new": here - 1}, SHORT, {}, random.Random())[0] == "new"
    assert rank(loads, {"known": here, "new": here + 5}, SHORT, {}, random.Random())[0] == "known"
