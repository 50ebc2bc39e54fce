"""The fleet's Prometheus page: the metric table summed over engines, without a replica label.

Made from snapshots at the time of the scrape, so that it lives wherever they can be had, with or without
the scheduler actor. A sum must not fall when an engine dies: `FleetCounters` remembers what it had counted.

    retired = fleet_counters.update(stats)   # once a scrape
    page = fleet_page(stats, retired)
"""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from dspark_ray.core.types import EngineStats
from dspark_ray.observability.metrics import (
    METRICS,
    Fleet,
    Kind,
    LabelValues,
    Metric,
    SampleKey,
    counter_values,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_DEAD_ENGINES_KEPT = (
    1000  # beyond it the first ones are added up; one of them that came back would count twice
)


class FleetCounters:
    """What dead engines had counted, so that sums never fall.

    The highest value ever seen of every counter is kept by engine id, which belongs to one incarnation: an
    engine that was thought dead and answers again is not counted twice. One owner, not thread-safe.
    """

    def __init__(self) -> None:
        self._highest: dict[str, dict[SampleKey, float]] = {}
        self._folded: dict[SampleKey, float] = {}

    def update(self, stats: Sequence[EngineStats]) -> dict[SampleKey, float]:
        """Take in the snapshots of the engines that answer; → what the page must add to their sum.

        That is the last count of every engine that is gone, and what an out-of-date snapshot lacks.
        """
        live: dict[SampleKey, float] = {}
        for one in stats:
            values = counter_values(one)
            _add(live, values)
            highest = self._highest.setdefault(one.engine_id, {})
            for key, value in values.items():
                highest[key] = max(highest.get(key, 0.0), value)
        self._fold({one.engine_id for one in stats})
        total = dict(self._folded)
        for counters in self._highest.values():
            _add(total, counters)
        return {key: value - live.get(key, 0.0) for key, value in total.items()}

    def _fold(self, live_ids: set[str]) -> None:
        dead = [engine_id for engine_id in self._highest if engine_id not in live_ids]
        for engine_id in dead[: max(len(dead) - _DEAD_ENGINES_KEPT, 0)]:
            _add(self._folded, self._highest.pop(engine_id))


def fleet_page(stats: Sequence[EngineStats], retired: Mapping[SampleKey, float]) -> str:
    """The page in Prometheus' text format; `retired` is `FleetCounters.update(stats)`, or empty.

    Counters and most gauges are summed over engines; times, ages and ratios are the highest (`Metric.fleet`).
    """
    registry = CollectorRegistry()
    registry.register(_FleetCollector(stats, retired))
    return generate_latest(registry).decode()


class _FleetCollector(Collector):
    """Families made from values: unlike prometheus-client's own counters they have no `_created` lines."""

    def __init__(self, stats: Sequence[EngineStats], retired: Mapping[SampleKey, float]) -> None:
        self._stats = stats
        self._retired = retired

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        for metric in METRICS:
            if metric.fleet is Fleet.NONE:
                continue
            family_class = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
            family = family_class(metric.name, metric.help, labels=metric.labels)
            for labels, value in sorted(self._values(metric).items(), key=lambda item: _natural(item[0])):
                family.add_metric(labels, value)
            yield family

    def _values(self, metric: Metric) -> dict[LabelValues, float]:
        values = {labels: value for (name, labels), value in self._retired.items() if name == metric.name}
        for one in self._stats:
            for labels, value in metric.read(one).items():
                if metric.fleet is Fleet.MAX and labels in values:
                    values[labels] = max(values[labels], value)
                else:
                    values[labels] = values.get(labels, 0.0) + value
        if not values and not metric.labels and metric.fleet is Fleet.SUM:
            values[()] = 0.0  # an empty fleet counts nothing, which is not the same as not counting
        return values


def _natural(labels: LabelValues) -> tuple[tuple[float, str], ...]:
    """Position 10 after position 9, and +Inf last."""
    return tuple(
        (float(value) if value.lstrip("+") == "Inf" or value.isdigit() else -1.0, value) for value in labels
    )


def _add(total: dict[SampleKey, float], values: Mapping[SampleKey, float]) -> None:
    for key, value in values.items():
        total[key] = total.get(key, 0.0) + value
