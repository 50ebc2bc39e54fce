"""The router's adapter to Serve: whatever is known of the replicas, each of them is in the answer."""

from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.router import STATS_KEY, GoodputRouter, load_of, routed_request
from dspark_ray.core.types import Request, SamplingParams
from dspark_ray.scheduling.load import ReplicaLoad

LOAD = ReplicaLoad(0, 0, 8, 10_000, ((1, 20.0), (8, 100.0)), 1.0)
FAST = replace(LOAD, rates=((1, 60.0), (8, 300.0)))


def _router(queue_lengths: dict[str, int] | None = None) -> GoodputRouter:
    """Serve's base class asks for a running cluster; the adapter needs only its queue lengths."""
    router = object.__new__(GoodputRouter)
    router.initialize_state()
    lengths = queue_lengths or {}
    router._replica_queue_len_cache = SimpleNamespace(
        get=lambda replica_id: lengths.get(replica_id.unique_id)
    )
    return router


def _replica(
    name: str, load: ReplicaLoad | None = None, stats: dict[str, Any] | None = None
) -> SimpleNamespace:
    reported = (stats or {}) if load is None else {STATS_KEY: asdict(load)}
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats=reported)


def _pending(prompt: tuple[int, ...] = (1,) * 200, emitted: tuple[int, ...] = ()) -> SimpleNamespace:
    request = Request("r.1", prompt, SamplingParams(max_tokens=50), emitted)
    return SimpleNamespace(args=[request], routing_context=SimpleNamespace(should_backoff=False))


async def _names(router: GoodputRouter, replicas: list[Any], pending: Any = None) -> list[str]:
    ranks = await router.choose_replicas(replicas, pending or _pending())
    assert all(len(rank) == 1 for rank in ranks)
    return [rank[0].replica_id.unique_id for rank in ranks]


@pytest.mark.parametrize("stats", [{}, {STATS_KEY: {}}, {STATS_KEY: {"an": "older version's"}}])
async def test_replicas_that_have_not_reported_are_all_there(stats: dict[str, Any]) -> None:
    replicas = [_replica(name, stats=stats) for name in "abc"]
    assert sorted(await _names(_router(), replicas)) == ["a", "b", "c"]
    two = replicas[:2]
    assert await _names(_router({"a": 3, "b": 1}), two) == ["b", "a"]  # by their queues


async def test_one_replica_is_chosen_whatever_it_says() -> None:
    full = replace(LOAD, num_running=8, num_waiting=100, free_tokens=0)
    nothing_known = replace(LOAD, rates=())
    for load in (None, LOAD, full, nothing_known):
        assert await _names(_router(), [_replica("a", load)]) == ["a"]


async def test_all_full_are_all_ranked_and_serve_waits_before_it_asks_again() -> None:
    full = replace(LOAD, num_running=8, num_waiting=20, free_tokens=0)
    pending = _pending()
    replicas = [_replica(name, full) for name in "abcd"]
    assert sorted(await _names(_router({"a": 28, "b": 28}), replicas, pending)) == ["a", "b", "c", "d"]
    assert pending.routing_context.should_backoff


async def test_the_next_in_rank_follows_one_that_is_gone() -> None:
    replicas = [_replica("fast", FAST), _replica("slow", LOAD)]
    assert await _names(_router(), replicas) == ["fast", "slow"]
    assert await _names(_router(), replicas[1:]) == ["slow"]  # Serve leaves dead ones out
    new = [_replica("fast", FAST), _replica("new")]
    assert await _names(_router({"fast": 2, "new": 0}), new) == ["new", "fast"]  # taken to be as fast


async def test_a_resumed_request_goes_where_its_beginning_is_but_never_only_there() -> None:
    router, replicas = _router(), [_replica(name, LOAD) for name in "abcde"]
    router.on_request_routed(_pending(), SimpleNamespace(unique_id="c"), None)
    resumed = _pending(emitted=(2,) * 30)
    for _ in range(20):
        names = await _names(router, replicas, resumed)
        assert names[0] == "c"
        assert sorted(names) == list("abcde")
    without = [replica for replica in replicas if replica.replica_id.unique_id != "c"]
    assert sorted(await _names(router, without, resumed)) == list("abde")


async def test_calls_without_a_request_are_routed_too() -> None:
    router = _router()
    assert await router.choose_replicas([], None) == []
    ranks = await router.choose_replicas([_replica("a", LOAD)], None)
    assert len(ranks) == 1
    strange = SimpleNamespace(args=["no request"], routing_context=SimpleNamespace())
    assert await _names(router, [_replica("a", LOAD), _replica("b")], strange)


def test_a_load_is_read_whole_or_not_at_all() -> None:
    assert load_of({STATS_KEY: asdict(LOAD)}) == LOAD
    assert load_of({STATS_KEY: {**asdict(LOAD), "more": 1}}) is None
    resumed = routed_request(_pending(emitted=(2,) * 30))
    assert (len(resumed.prompt_token_ids), resumed.max_tokens) == (230, 20)
