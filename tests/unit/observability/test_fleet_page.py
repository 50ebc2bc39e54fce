"""The fleet's page: valid Prometheus text whose sums never fall."""

from prometheus_client.parser import text_string_to_metric_families

from dspark_ray.core.types import EngineStats
from dspark_ray.observability import fleet_page as module
from dspark_ray.observability.fleet_page import FleetCounters, fleet_page
from dspark_ray.observability.metrics import METRICS, Fleet, Kind
from tests.unit.observability.snapshots import snapshot


def parse(page: str) -> dict[str, float]:
    """Sample name, with its position if it has one → value."""
    samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
    assert all(set(s.labels) <= {"position", "le"} for s in samples), "no replica label"
    return {s.name + "".join(s.labels.values()): s.value for s in samples}


def scrape(counters: FleetCounters, stats: list[EngineStats]) -> dict[str, float]:
    return parse(fleet_page(stats, counters.update(stats)))


def test_every_fleet_metric_is_there_and_nothing_created():
    page = fleet_page([snapshot()], {})
    assert "_created" not in page
    assert "distribution" not in page
    for metric in METRICS:
        assert (f"# TYPE {metric.name} {metric.kind.value}\n" in page) == (metric.fleet is not Fleet.NONE)


def test_counters_are_summed_and_gauges_summed_or_highest():
    one = snapshot("a", scale=2, step_measured_ms=10.0)
    two = snapshot("b", scale=3, kv_used_blocks=90, plan_age_ms=None, ready=False)
    page = scrape(FleetCounters(), [one, two])
    assert page["dspark_drafts_total"] == 50
    assert page["vllm:spec_decode_num_drafts_total"] == 50
    assert page["dspark_accepted_per_position_total2"] == 25
    assert page["dspark_first_token_within_total1000"] == 25
    assert page["dspark_first_token_within_total+Inf"] == 30
    assert page["dspark_good_tokens_total"] == 105
    assert page["dspark_requests_running"] == 4
    assert page["dspark_kv_used_blocks"] == 115
    assert page["dspark_kv_usage_ratio"] == 0.9
    assert page["dspark_step_measured_ms"] == 25.0
    assert page["dspark_plan_age_ms"] == 120.0
    assert page["dspark_plan_live"] == 1
    assert page["dspark_ready"] == 1
    assert page["dspark_engines"] == 2


def test_positions_are_in_order_and_blocks_may_differ():
    lines = fleet_page([snapshot(block_size=12), snapshot("b")], {}).splitlines()
    found = [line for line in lines if line.startswith("dspark_accepted_per_position_total{")]
    assert [line.split('"')[1] for line in found] == [str(k) for k in range(1, 13)]
    assert found[0].endswith(" 16.0")


def test_no_sum_falls_when_engines_die_restart_or_answer_late():
    counters = FleetCounters()
    rounds = [
        [snapshot("a/1", 1), snapshot("b/1", 4)],
        [snapshot("a/1", 2)],  # b is dead
        [snapshot("a/1", 2), snapshot("b/2", 1)],  # its successor
        [],  # nobody answers
        [snapshot("b/2", 3), snapshot("a/1", 1)],  # an old snapshot of a
        [snapshot("b/1", 5), snapshot("b/2", 3)],  # b/1 was not dead after all
    ]
    expected = [50, 60, 70, 70, 90, 100]
    for stats, drafts in zip(rounds, expected, strict=True):
        page = scrape(counters, stats)
        assert page["dspark_drafts_total"] == drafts
        assert page["dspark_accepted_per_position_total1"] == drafts * 0.8
        assert page["dspark_drafted_tokens_total"] == (
            page["dspark_verified_tokens_total"] + page["dspark_trimmed_tokens_total"]
        )


def test_many_dead_engines_are_folded(monkeypatch):
    monkeypatch.setattr(module, "_DEAD_ENGINES_KEPT", 3)
    counters = FleetCounters()
    for i in range(20):
        page = scrape(counters, [snapshot(f"a/{i}")])
        assert page["dspark_drafts_total"] == 10 * (i + 1)
    assert len(counters._highest) == 4


def test_an_empty_fleet_is_a_page_of_zeros():
    page = scrape(FleetCounters(), [])
    plain = [m for m in METRICS if m.kind is Kind.COUNTER and not m.labels]
    assert all(page[metric.name] == 0.0 for metric in plain)
    assert page["dspark_engines"] == 0.0
    assert "dspark_plan_age_ms" not in page
