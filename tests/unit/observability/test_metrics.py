"""The metric table and how snapshots become increments."""

import re
from collections.abc import Mapping

import pytest

from dspark_ray.observability.metrics import METRICS, Kind, counter_values, publish
from tests.unit.observability.snapshots import snapshot

ISSUED_NAMES = [
    "dspark_drafts_total",
    *(
        f"dspark_{what}_tokens_total"
        for what in ("drafted", "verified", "trimmed", "accepted", "rejected", "emitted")
    ),
    "dspark_accepted_per_position_total",
    "dspark_target_steps_total",
    *(f"vllm:spec_decode_num_{what}_total" for what in ("drafts", "draft_tokens", "accepted_tokens")),
]


class RecordingSink:
    """Adds up what it is told."""

    def __init__(self) -> None:
        self.counters: dict[tuple[str, str], float] = {}
        self.gauges: dict[tuple[str, str], float] = {}
        self.observations: dict[str, list[float]] = {}

    def inc(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        assert value > 0
        key = (name, "".join(labels.values()))
        self.counters[key] = self.counters.get(key, 0.0) + value

    def set(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        self.gauges[name, labels.get("position", "")] = value

    def observe(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        self.observations.setdefault(name, []).append(value)


@pytest.mark.parametrize("name", ISSUED_NAMES)
def test_names_that_dashboards_rely_on(name):
    [metric] = [metric for metric in METRICS if metric.name == name]
    assert metric.kind is Kind.COUNTER
    assert metric.labels == (("position",) if "per_position" in name else ())


def test_the_table_is_well_formed():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"(dspark_|vllm:)[a-z0-9_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert metric.help.endswith(".")
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert all(bound > 0 for bound in metric.buckets)
        assert all(len(values) == len(metric.labels) for values in metric.read(snapshot()))


def test_increments_add_up_to_the_counters():
    sink, previous = RecordingSink(), None
    for scale in (1, 3, 3, 7):
        newest = snapshot(scale=scale)
        publish(newest, previous, sink)
        previous = newest
    assert sink.counters["dspark_drafts_total", ""] == 70
    assert sink.counters["dspark_accepted_per_position_total", "2"] == 35
    assert sink.counters["dspark_requests_finished_total", ""] == 42
    expected = {(name, "".join(labels)): value for (name, labels), value in counter_values(newest).items()}
    assert sink.counters == expected


def test_the_identities_survive_publishing():
    sink = RecordingSink()
    publish(snapshot(scale=2), None, sink)
    total = {name: value for (name, position), value in sink.counters.items() if not position}
    drafted, verified = total["dspark_drafted_tokens_total"], total["dspark_verified_tokens_total"]
    assert drafted == verified + total["dspark_trimmed_tokens_total"]
    assert verified == total["dspark_accepted_tokens_total"] + total["dspark_rejected_tokens_total"]
    assert total["vllm:spec_decode_num_draft_tokens_total"] == drafted


def test_a_new_engine_and_a_restarted_one_count_anew():
    sink = RecordingSink()
    publish(snapshot("a", scale=5), None, sink)
    publish(snapshot("b", scale=2), snapshot("a", scale=5), sink)
    assert sink.counters["dspark_drafts_total", ""] == 70
    publish(snapshot("b", scale=1), snapshot("b", scale=2), sink)
    assert sink.counters["dspark_drafts_total", ""] == 80


def test_gauges_and_histograms():
    sink = RecordingSink()
    publish(snapshot(), None, sink)
    publish(snapshot(num_running=9, plan_age_ms=None, ready=False), snapshot(), sink)
    assert sink.gauges["dspark_requests_running", ""] == 9
    assert sink.gauges["dspark_kv_usage_ratio", ""] == 0.25
    assert sink.gauges["dspark_step_prediction_error_ratio", ""] == pytest.approx(0.2)
    assert sink.gauges["dspark_plan_live", ""] == 0
    assert sink.gauges["dspark_ready", ""] == 0
    assert sink.observations["dspark_step_measured_ms_distribution"] == [25.0, 25.0]
    assert sink.observations["dspark_draft_budget_tokens_distribution"] == [5.5, 5.5]


def test_an_idle_engine_observes_nothing():
    sink = RecordingSink()
    publish(snapshot(step_predicted_ms=0.0, step_measured_ms=0.0, kv_total_blocks=0), None, sink)
    assert sink.observations == {}
    assert sink.gauges["dspark_step_prediction_error_ratio", ""] == 0.0
    assert sink.gauges["dspark_kv_usage_ratio", ""] == 0.0
