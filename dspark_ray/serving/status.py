"""Bodies of `/health` and `/ready`. The state of speculation is a field in them, never the status."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dspark_ray.core.config import AppConfig
from dspark_ray.core.types import EngineStats


@dataclass
class Readiness:
    """Ready once every replica has passed its canary generation; then as long as one still has.

    A replica that is being replaced must not take a whole application out of a load balancer.
    """

    expected_replicas: int
    _was_complete: bool = field(default=False, init=False)

    def update(self, stats: Sequence[EngineStats]) -> bool:
        num_ready = sum(stat.ready for stat in stats)
        self._was_complete = self._was_complete or num_ready >= self.expected_replicas
        return self._was_complete and (num_ready > 0 or self.expected_replicas == 0)


def status_body(config: AppConfig, stats: Sequence[EngineStats], *, ready: bool) -> dict[str, Any]:
    """What an operator wants to see first. stats: of the replicas that answered"""
    return {
        "status": "ready" if ready else "starting",
        "model": config.model.id,
        "replicas": {
            "expected": config.serving.least_replicas,
            "live": len(stats),
            "ready": sum(stat.ready for stat in stats),
        },
        "engine": config.engine.kind,
        "simulated": config.engine.kind == "timed",  # no figure of the timed engine is a measurement
        "speculation": speculation_body(config, stats),
    }


def speculation_body(config: AppConfig, stats: Sequence[EngineStats]) -> dict[str, Any]:
    """Sums over replicas; τ is emitted decode tokens per request and target step."""
    counters = [stat.counters for stat in stats]
    drafted = sum(counter.drafted_tokens for counter in counters)
    request_steps = sum(counter.request_steps for counter in counters)
    decode_tokens = sum(counter.decode_tokens for counter in counters)
    return {
        "mode": str(config.speculation.mode),
        "drafter": config.speculation.drafter.kind,
        "num_draft_tokens": config.speculation.num_draft_tokens,
        "active": drafted > 0,
        "drafted_tokens": drafted,
        "verified_tokens": sum(counter.verified_tokens for counter in counters),
        "accepted_tokens": sum(counter.accepted_tokens for counter in counters),
        "tau": round(decode_tokens / request_steps, 4) if request_steps else 0.0,
        "contexts": [[asdict(band) for band in stat.context_bands] for stat in stats if stat.context_bands],
    }
