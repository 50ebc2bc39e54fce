"""The line a replica writes every ten seconds: what speculation did since the last one."""

from collections.abc import Sequence

from dspark_ray.core.types import EngineStats

_NOTHING = "–"


def log_line(stats: EngineStats, previous: EngineStats, elapsed_s: float) -> str:
    """One line from two snapshots of one engine, `elapsed_s` apart.

    τ and the acceptance per position (accepted over verified at that place) are over the interval; the
    budget is the mean of verified draft tokens a target step. A figure without data is a dash.
    """
    now, before = stats.counters, previous.counters
    tau = _ratio(now.decode_tokens - before.decode_tokens, now.request_steps - before.request_steps, ".2f")
    budget = _ratio(
        now.verified_tokens - before.verified_tokens, now.target_steps - before.target_steps, ".1f"
    )
    acceptance = _per_position(
        _difference(now.accepted_per_position, before.accepted_per_position),
        _difference(now.verified_per_position, before.verified_per_position),
    )
    tokens_per_s = _ratio(now.emitted_tokens - before.emitted_tokens, elapsed_s, ".1f")
    kv_share = _ratio(100 * stats.kv_used_blocks, stats.kv_total_blocks, ".0f")
    return (
        f"{stats.engine_id}: tau {tau} | accepted by position {acceptance} | budget {budget}/step | "
        f"{tokens_per_s} tok/s | running {stats.num_running} waiting {stats.num_waiting} | KV {kv_share}%"
    )


def _difference(now: Sequence[int], before: Sequence[int]) -> list[int]:
    return [a - b for a, b in zip(now, before, strict=True)]


def _per_position(accepted: Sequence[int], verified: Sequence[int]) -> str:
    if not any(verified):
        return _NOTHING
    return " ".join(_ratio(a, v, ".2f") for a, v in zip(accepted, verified, strict=True))


def _ratio(part: float, whole: float, form: str) -> str:
    return format(part / whole, form) if whole > 0 else _NOTHING
