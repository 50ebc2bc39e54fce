"""Engine snapshots for these tests."""

from typing import Any

from dspark_ray.core.request_times import RequestTimes, TimeCounts
from dspark_ray.core.types import EngineStats, SpeculationCounters


def counters(scale: int = 1, block_size: int = 3) -> SpeculationCounters:
    """Counters that keep the identities; every one differs from the others."""
    return SpeculationCounters(
        block_size=block_size,
        drafts=10 * scale,
        drafted_tokens=30 * scale,
        verified_tokens=22 * scale,
        trimmed_tokens=8 * scale,
        accepted_tokens=15 * scale,
        rejected_tokens=7 * scale,
        emitted_tokens=27 * scale,
        decode_tokens=25 * scale,
        request_steps=12 * scale,
        target_steps=11 * scale,
        expected_tokens=14.5 * scale,
        verified_per_position=[10 * scale, 8 * scale, 4 * scale] + [0] * (block_size - 3),
        accepted_per_position=[8 * scale, 5 * scale, 2 * scale] + [0] * (block_size - 3),
    )


def snapshot(engine_id: str = "engine-0", scale: int = 1, block_size: int = 3, **changes: Any) -> EngineStats:
    fields: dict[str, Any] = {
        "engine_id": engine_id,
        "counters": counters(scale, block_size),
        "num_running": 2,
        "num_waiting": 3,
        "kv_used_blocks": 25,
        "kv_total_blocks": 100,
        "prefix_hit_tokens": 40 * scale,
        "prefix_query_tokens": 50 * scale,
        "num_preemptions": 1 * scale,
        "num_finished": 6 * scale,
        "num_aborted": 2 * scale,
        "num_refused": 4 * scale,
        "budget_tokens": 5.5,
        "step_predicted_ms": 20.0,
        "step_measured_ms": 25.0,
        "plan_age_ms": 120.0,
        "times": RequestTimes(
            TimeCounts((100, 1000), (2 * scale, 3 * scale, scale), 2500.0 * scale),
            TimeCounts((10, 20), (4 * scale, scale, 0), 40.0 * scale),
            good_tokens=21 * scale,
        ),
        "ready": True,
    }
    return EngineStats(**{**fields, **changes})
