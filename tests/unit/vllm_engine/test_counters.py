"""vLLM's statistics as our counters; their identities hold."""

from types import SimpleNamespace
from typing import Any

from dspark_ray.core.clock import ManualClock
from dspark_ray.vllm_engine.counters import VllmCounters


def scheduler(
    running: int = 1,
    waiting: int = 0,
    usage: float = 0.0,
    hits: int = 0,
    queries: int = 0,
    drafts: Any = None,
) -> Any:
    return SimpleNamespace(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_skipped_waiting_reqs=0,
        kv_cache_usage=usage,
        prefix_cache_stats=SimpleNamespace(hits=hits, queries=queries),
        spec_decoding_stats=drafts,
    )


def drafted(*accepted: int, k: int = 3) -> Any:
    """One draft of `k` tokens for each number of accepted ones."""
    return SimpleNamespace(
        num_drafts=len(accepted),
        num_draft_tokens=k * len(accepted),
        num_accepted_tokens=sum(accepted),
        num_draft_tokens_per_pos=[len(accepted)] * k,
        num_accepted_tokens_per_pos=[sum(n > position for n in accepted) for position in range(k)],
    )


def iteration(first: int = 0, decoding: tuple[int, ...] = (), preempted: int = 0) -> Any:
    """`first`: requests that got their first token; `decoding`: tokens of each other one."""
    return SimpleNamespace(
        time_to_first_tokens_iter=[0.1] * first,
        inter_token_latencies_iter=[0.01] * len(decoding),
        num_generation_tokens=first + sum(decoding),
        num_preempted_reqs=preempted,
    )


def test_a_prefill_and_two_steps() -> None:
    counters = VllmCounters(3, ManualClock())
    counters.record(scheduler(2, hits=4, queries=10), iteration(first=2), 0)
    counters.record(scheduler(2, drafts=drafted(2, 0)), iteration(decoding=(3, 1)), 0)
    counters.record(scheduler(1, 1), iteration(decoding=(1,), preempted=1), 0)  # nothing was drafted
    c = counters.counters()
    assert (c.drafts, c.drafted_tokens, c.verified_tokens, c.trimmed_tokens) == (2, 6, 6, 0)
    assert (c.accepted_tokens, c.rejected_tokens) == (2, 4)
    assert c.accepted_per_position == [1, 1, 0]
    assert c.verified_per_position == [2, 2, 2]
    assert (c.target_steps, c.request_steps) == (3, 3)
    assert (c.emitted_tokens, c.decode_tokens) == (7, 5)
    assert c.tau == 5 / 3  # the step without a draft counts
    assert (counters.prefix_hit_tokens, counters.prefix_query_tokens) == (4, 10)
    assert counters.num_preemptions == 1
    assert (counters.load().num_running, counters.load().num_waiting) == (1, 1)


def test_copies_do_not_change() -> None:
    counters = VllmCounters(3, ManualClock())
    before = counters.counters()
    counters.record(scheduler(drafts=drafted(3)), None, 0)
    assert before.accepted_per_position == [0, 0, 0]
    assert counters.counters().accepted_per_position == [1, 1, 1]


def test_ranks_add_up() -> None:
    counters = VllmCounters(3, ManualClock())
    counters.record(scheduler(3, 1, usage=0.5), None, 0)
    counters.record(scheduler(2, 0, usage=0.1), None, 1)
    load = counters.load()
    assert (load.num_running, load.num_waiting) == (5, 1)
    assert load.kv_usage == 0.3


def test_step_times_are_those_of_a_busy_core() -> None:
    clock = ManualClock()
    counters = VllmCounters(3, clock)
    counters.record(scheduler(1), iteration(first=1), 0)
    clock.advance(10.0)
    counters.record(scheduler(1, drafts=drafted(0)), iteration(decoding=(1,)), 0)
    clock.advance(20.0)
    counters.record(scheduler(0), iteration(decoding=(1,)), 0)  # the last one: idle from here
    clock.advance(300.0)
    counters.record(scheduler(1), iteration(first=1), 0)
    assert [step.measured_ms for step in counters.recent.steps()] == [10.0, 20.0]
    assert counters.recent.summary().budget_tokens == 1.5
