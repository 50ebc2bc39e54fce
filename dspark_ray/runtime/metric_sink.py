"""The metric table as Ray metrics, tagged with their replica. Ray exports it at every node."""

from collections.abc import Mapping

from ray.util.metrics import Counter, Gauge, Histogram
from ray.util.metrics import Metric as RayMetric

from dspark_ray.observability.metrics import METRICS, Kind, Metric


class RayMetricSink:
    """`dspark_ray.observability.metrics.MetricSink` over `ray.util.metrics`."""

    def __init__(self, app_name: str, replica_id: str) -> None:
        self._tags = {"application": app_name, "replica": replica_id}
        self._metrics = {metric.name: _ray_metric(metric, tuple(self._tags)) for metric in METRICS}

    def inc(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        self._metrics[name].inc(value, self._all_tags(labels))  # type: ignore[attr-defined]

    def set(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        self._metrics[name].set(value, self._all_tags(labels))  # type: ignore[attr-defined]

    def observe(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        self._metrics[name].observe(value, self._all_tags(labels))  # type: ignore[attr-defined]

    def _all_tags(self, labels: Mapping[str, str]) -> dict[str, str]:
        return {**self._tags, **labels}


def _ray_metric(metric: Metric, tags: tuple[str, ...]) -> RayMetric:
    tag_keys = (*tags, *metric.labels)
    name = metric.name.replace(":", "_")  # Ray allows no colon
    if metric.kind is Kind.COUNTER:
        return Counter(name, description=metric.help, tag_keys=tag_keys)
    if metric.kind is Kind.GAUGE:
        return Gauge(name, description=metric.help, tag_keys=tag_keys)
    boundaries = [bound for bound in metric.buckets if bound > 0]  # Ray takes no boundary at 0
    return Histogram(name, description=metric.help, boundaries=boundaries, tag_keys=tag_keys)
