"""vLLM's statistics as our counters: one `record` per step of its engine core.

What vLLM schedules for verification counts as verified. With its adaptive verification the cut is made on
the device and is not in its statistics: what was cut then counts as rejected, and nothing as trimmed. τ is
exact either way.
"""

from dataclasses import dataclass, replace
from typing import Any

from dspark_ray.core.clock import Clock
from dspark_ray.core.types import SpeculationCounters
from dspark_ray.engine.recent import RecentSteps, StepRecord


@dataclass(frozen=True, slots=True)
class CoreLoad:
    """One engine core (one data-parallel rank) as of its newest step."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0  # share of its KV blocks


class VllmCounters:
    """Written by the thread that reads vLLM's outputs; `counters()` and `load()` are copies for others."""

    def __init__(self, num_draft_tokens: int, clock: Clock) -> None:
        self.recent = RecentSteps(clock)
        self.prefix_hit_tokens = self.prefix_query_tokens = 0
        self.num_preemptions = 0
        self._counters = SpeculationCounters(num_draft_tokens)
        self._clock = clock
        self._cores: dict[int, CoreLoad] = {}
        self._last_ms: dict[int, float] = {}  # when a core's last step ended, while it is busy

    def counters(self) -> SpeculationCounters:
        c = self._counters
        return replace(
            c,
            verified_per_position=list(c.verified_per_position),
            accepted_per_position=list(c.accepted_per_position),
        )

    def load(self) -> CoreLoad:
        """All cores together; the KV share is their mean."""
        cores = list(self._cores.values()) or [CoreLoad()]
        return CoreLoad(
            sum(core.num_running for core in cores),
            sum(core.num_waiting for core in cores),
            sum(core.kv_usage for core in cores) / len(cores),
        )

    def record(self, scheduler: Any, iteration: Any, core: int) -> None:
        """One step: vLLM's `SchedulerStats` and `IterationStats` (None where it has none to tell)."""
        drafted = 0
        if scheduler is not None:
            num_waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
            self._cores[core] = CoreLoad(scheduler.num_running_reqs, num_waiting, scheduler.kv_cache_usage)
            self.prefix_query_tokens += scheduler.prefix_cache_stats.queries
            self.prefix_hit_tokens += scheduler.prefix_cache_stats.hits
            drafted = self._count_drafts(scheduler.spec_decoding_stats)
        num_decoding = 0
        if iteration is not None:
            # vLLM times each output: since arrival for a first one, since the last for the others.
            num_first = len(iteration.time_to_first_tokens_iter)
            num_decoding = len(iteration.inter_token_latencies_iter)
            self._counters.emitted_tokens += iteration.num_generation_tokens
            self._counters.decode_tokens += iteration.num_generation_tokens - num_first
            self._counters.request_steps += num_decoding
            self.num_preemptions += iteration.num_preempted_reqs
        self._counters.target_steps += 1
        self._note_time(core, drafted, num_decoding)

    def _count_drafts(self, drafts: Any) -> int:
        if drafts is None:
            return 0
        c = self._counters
        c.drafts += drafts.num_drafts
        c.drafted_tokens += drafts.num_draft_tokens
        c.verified_tokens += drafts.num_draft_tokens
        c.accepted_tokens += drafts.num_accepted_tokens
        c.rejected_tokens += drafts.num_draft_tokens - drafts.num_accepted_tokens
        for position, count in enumerate(drafts.num_draft_tokens_per_pos):
            c.verified_per_position[position] += count
        for position, count in enumerate(drafts.num_accepted_tokens_per_pos):
            c.accepted_per_position[position] += count
        return int(drafts.num_draft_tokens)

    def _note_time(self, core: int, drafted: int, num_decoding: int) -> None:
        """The time between two steps of a busy core; a step after a pause has no known beginning."""
        now_ms, last_ms = self._clock.now_ms(), self._last_ms.get(core)
        if last_ms is not None:
            self.recent.add(
                StepRecord(
                    ended_ms=now_ms,
                    measured_ms=now_ms - last_ms,
                    predicted_ms=0.0,
                    budget_tokens=drafted,
                    rows=num_decoding + drafted,
                    num_decoding=num_decoding,
                )
            )
        load = self._cores.get(core, CoreLoad())
        if load.num_running + load.num_waiting:
            self._last_ms[core] = now_ms
        else:
            self._last_ms.pop(core, None)
