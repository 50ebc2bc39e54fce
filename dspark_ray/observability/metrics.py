"""Every metric of the program in one table, and how two snapshots of an engine become increments.

An engine only counts (`EngineStats`); nothing in a step touches a metric. Whoever holds a sink, e.g. the
one that writes Ray metrics, calls `publish` about once a second with the newest snapshot and the one before.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from dspark_ray.core.request_times import RequestTimes, TimeCounts
from dspark_ray.core.types import EngineStats

LabelValues = tuple[str, ...]
SampleKey = tuple[str, LabelValues]  # metric name, label values


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Fleet(StrEnum):
    """How a metric of several engines becomes one figure on the fleet's page."""

    SUM = "sum"
    MAX = "max"
    NONE = "none"  # per replica only: a histogram's observations are not part of a snapshot


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. `read` gives a snapshot's values by label values; empty when there is none."""

    name: str
    kind: Kind
    help: str
    read: Callable[[EngineStats], Mapping[LabelValues, float]]
    labels: tuple[str, ...] = ()
    fleet: Fleet = Fleet.SUM
    buckets: tuple[float, ...] = ()


class MetricSink(Protocol):
    """Where metrics go. Called by `publish` on its caller's thread; must not block."""

    def inc(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Add to a counter; value > 0."""
        ...

    def set(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Set a gauge."""
        ...

    def observe(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """One observation of a histogram."""
        ...


def _one(read: Callable[[EngineStats], float]) -> Callable[[EngineStats], Mapping[LabelValues, float]]:
    return lambda stats: {(): float(read(stats))}


def _counter(name: str, text: str, read: Callable[[EngineStats], float]) -> Metric:
    return Metric(name, Kind.COUNTER, text, _one(read))


def _gauge(name: str, text: str, read: Callable[[EngineStats], float], fleet: Fleet = Fleet.SUM) -> Metric:
    return Metric(name, Kind.GAUGE, text, _one(read), fleet=fleet)


def _per_position(name: str, text: str, read: Callable[[EngineStats], Sequence[int]]) -> Metric:
    def by_position(stats: EngineStats) -> Mapping[LabelValues, float]:
        return {(str(k),): float(value) for k, value in enumerate(read(stats), start=1)}

    return Metric(name, Kind.COUNTER, text, by_position, labels=("position",))


def _time_counts(name: str, text: str, read: Callable[[RequestTimes], TimeCounts]) -> tuple[Metric, Metric]:
    """Counters that histogram_quantile takes: engines count by themselves, so they are no histogram here."""
    return (
        Metric(
            f"{name}_within_total",
            Kind.COUNTER,
            f"{text} within `le` milliseconds.",
            lambda stats: {(bound,): float(count) for bound, count in read(stats.times).cumulative},
            labels=("le",),
        ),
        _counter(f"{name}_ms_total", f"{text}: the sum of the times.", lambda s: read(s.times).sum_ms),
    )


def _histogram(
    name: str, text: str, read: Callable[[EngineStats], float], buckets: tuple[float, ...]
) -> Metric:
    def when_stepping(stats: EngineStats) -> Mapping[LabelValues, float]:
        return {(): float(read(stats))} if stats.step_measured_ms > 0 else {}

    return Metric(name, Kind.HISTOGRAM, text, when_stepping, fleet=Fleet.NONE, buckets=buckets)


def _plan_age(stats: EngineStats) -> Mapping[LabelValues, float]:
    return {} if stats.plan_age_ms is None else {(): stats.plan_age_ms}


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _prediction_error(stats: EngineStats) -> float:
    return _share(abs(stats.step_predicted_ms - stats.step_measured_ms), stats.step_measured_ms)


_STEP_MS_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 35.0, 50.0, 75.0, 100.0, 150.0, 250.0, 500.0, 1000.0, 2500.0)
_BUDGET_BUCKETS = (0.5, 1.0, 2.0, 4.0, 7.0, 14.0, 28.0, 56.0, 112.0, 224.0, 448.0, 896.0, 1792.0)

METRICS: tuple[Metric, ...] = (
    # Speculation. drafted = verified + trimmed; verified = accepted + rejected.
    _counter("dspark_drafts_total", "Blocks drafted.", lambda s: s.counters.drafts),
    _counter("dspark_drafted_tokens_total", "Tokens drafted.", lambda s: s.counters.drafted_tokens),
    _counter(
        "dspark_verified_tokens_total",
        "Draft tokens run by the target.",
        lambda s: s.counters.verified_tokens,
    ),
    _counter(
        "dspark_trimmed_tokens_total", "Draft tokens never verified.", lambda s: s.counters.trimmed_tokens
    ),
    _counter("dspark_accepted_tokens_total", "Draft tokens emitted.", lambda s: s.counters.accepted_tokens),
    _counter(
        "dspark_rejected_tokens_total", "Draft tokens verified in vain.", lambda s: s.counters.rejected_tokens
    ),
    _counter("dspark_emitted_tokens_total", "Output tokens, all.", lambda s: s.counters.emitted_tokens),
    _counter(
        "dspark_decode_tokens_total",
        "Output tokens of decoding steps; over dspark_request_steps_total this is tau.",
        lambda s: s.counters.decode_tokens,
    ),
    _counter(
        "dspark_request_steps_total",
        "Target steps counted once per decoding request, those without a draft included.",
        lambda s: s.counters.request_steps,
    ),
    _counter("dspark_target_steps_total", "Forward passes of the target.", lambda s: s.counters.target_steps),
    _per_position(
        "dspark_verified_per_position_total",
        "Draft tokens verified, by place in the block (1 is the first).",
        lambda s: s.counters.verified_per_position,
    ),
    _per_position(
        "dspark_accepted_per_position_total",
        "Draft tokens accepted, by place in the block (1 is the first).",
        lambda s: s.counters.accepted_per_position,
    ),
    _counter(
        "dspark_expected_accepted_tokens_total",
        "What accepted tokens would be if every calibrated confidence were true.",
        lambda s: s.counters.expected_tokens,
    ),
    # The same under vLLM's names, for dashboards that exist.
    _counter(
        "vllm:spec_decode_num_drafts_total", "Alias of dspark_drafts_total.", lambda s: s.counters.drafts
    ),
    _counter(
        "vllm:spec_decode_num_draft_tokens_total",
        "Alias of dspark_drafted_tokens_total.",
        lambda s: s.counters.drafted_tokens,
    ),
    _counter(
        "vllm:spec_decode_num_accepted_tokens_total",
        "Alias of dspark_accepted_tokens_total.",
        lambda s: s.counters.accepted_tokens,
    ),
    # Requests.
    _counter(
        "dspark_requests_finished_total", "Requests that ended by themselves.", lambda s: s.num_finished
    ),
    _counter("dspark_requests_aborted_total", "Requests ended by their client.", lambda s: s.num_aborted),
    _counter(
        "dspark_requests_refused_total",
        "Requests turned away for want of room or time, at the door or out of the queue.",
        lambda s: s.num_refused,
    ),
    _counter("dspark_requests_preempted_total", "Preemptions for KV blocks.", lambda s: s.num_preemptions),
    _gauge("dspark_requests_running", "Requests being decoded or prefilled.", lambda s: s.num_running),
    _gauge("dspark_requests_waiting", "Requests in the queue.", lambda s: s.num_waiting),
    *_time_counts(
        "dspark_first_token", "Requests whose first token left the engine", lambda t: t.first_token
    ),
    *_time_counts(
        "dspark_token_time", "Requests whose later tokens took, on average,", lambda t: t.per_token
    ),
    _counter(
        "dspark_good_tokens_total",
        "Output tokens of requests that kept to observability.goodput.",
        lambda s: s.times.good_tokens,
    ),
    # Memory.
    _counter(
        "dspark_prefix_cache_query_tokens_total", "Prompt tokens looked up.", lambda s: s.prefix_query_tokens
    ),
    _counter(
        "dspark_prefix_cache_hit_tokens_total",
        "Prompt tokens found in the cache.",
        lambda s: s.prefix_hit_tokens,
    ),
    _gauge("dspark_kv_used_blocks", "KV blocks in use.", lambda s: s.kv_used_blocks),
    _gauge("dspark_kv_capacity_blocks", "KV blocks there are.", lambda s: s.kv_total_blocks),
    _gauge(
        "dspark_kv_usage_ratio",
        "Share of KV blocks in use; of a fleet, that of its fullest engine.",
        lambda s: _share(s.kv_used_blocks, s.kv_total_blocks),
        Fleet.MAX,
    ),
    # Steps. Means over the last second; of a fleet, the slowest or worst engine, budgets added up.
    _gauge("dspark_draft_budget_tokens", "Draft tokens verified per step.", lambda s: s.budget_tokens),
    _gauge("dspark_step_predicted_ms", "Step time foreseen.", lambda s: s.step_predicted_ms, Fleet.MAX),
    _gauge("dspark_step_measured_ms", "Step time measured.", lambda s: s.step_measured_ms, Fleet.MAX),
    _gauge(
        "dspark_step_prediction_error_ratio",
        "|foreseen - measured| / measured.",
        _prediction_error,
        Fleet.MAX,
    ),
    _histogram(
        "dspark_draft_budget_tokens_distribution",
        "Draft tokens verified per step, one observation per publication.",
        lambda s: s.budget_tokens,
        _BUDGET_BUCKETS,
    ),
    _histogram(
        "dspark_step_predicted_ms_distribution",
        "Step time foreseen, one observation per publication.",
        lambda s: s.step_predicted_ms,
        _STEP_MS_BUCKETS,
    ),
    _histogram(
        "dspark_step_measured_ms_distribution",
        "Step time measured, one observation per publication.",
        lambda s: s.step_measured_ms,
        _STEP_MS_BUCKETS,
    ),
    # The central scheduler and readiness.
    _gauge(
        "dspark_plan_live",
        "1 while a live plan of the central scheduler is followed; of a fleet, how many engines do.",
        lambda s: float(s.plan_age_ms is not None),
    ),
    Metric(
        "dspark_plan_age_ms",
        Kind.GAUGE,
        "Age of the plan followed, absent without one; of a fleet, the oldest.",
        _plan_age,
        fleet=Fleet.MAX,
    ),
    _gauge(
        "dspark_ready", "1 once the canary has passed; of a fleet, ready engines.", lambda s: float(s.ready)
    ),
    _gauge("dspark_engines", "Engines that report.", lambda s: 1.0),
    _gauge(
        "dspark_timed_engines",
        "Engines that sleep instead of computing: figures beside them are simulated.",
        lambda s: float(s.kind == "timed"),
    ),
)


def counter_values(stats: EngineStats) -> dict[SampleKey, float]:
    """Every counter of a snapshot, by name and label values."""
    counters = (metric for metric in METRICS if metric.kind is Kind.COUNTER)
    return {(m.name, labels): value for m in counters for labels, value in m.read(stats).items()}


def publish(stats: EngineStats, previous: EngineStats | None, sink: MetricSink) -> None:
    """Bring `sink` from the snapshot `previous` to `stats`.

    None, or a snapshot of another engine, means that nothing was published of this one. Both snapshots must
    own their counters (a copy, not the engine's live object). A counter that fell has been restarted and
    counts anew.
    """
    known = counter_values(previous) if previous is not None and previous.engine_id == stats.engine_id else {}
    for metric in METRICS:
        for values, value in metric.read(stats).items():
            labels = dict(zip(metric.labels, values, strict=True))
            if metric.kind is Kind.GAUGE:
                sink.set(metric.name, value, labels)
            elif metric.kind is Kind.HISTOGRAM:
                sink.observe(metric.name, value, labels)
            else:
                before = known.get((metric.name, values), 0.0)
                increment = value - before if value >= before else value
                if increment > 0:
                    sink.inc(metric.name, increment, labels)
