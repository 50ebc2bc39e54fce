"""Dashboards and alerts ask for metrics that exist, where they ask for them."""

import functools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from ray import serve

from dspark_ray.observability.metrics import METRICS, Fleet, Kind, Metric

CLUSTER = Path(__file__).resolve().parents[3] / "cluster"
ALERT_TESTS = Path(__file__).with_name("alerts_test.yaml")
DASHBOARDS = sorted((CLUSTER / "grafana" / "dashboards").glob("*.json"))
BY_NAME = {metric.name: metric for metric in METRICS}


def panels(path: Path) -> list[dict[str, Any]]:
    return [panel for panel in json.loads(path.read_text())["panels"] if panel["type"] != "row"]


def dashboard_queries() -> list[str]:
    queries = [target["expr"] for path in DASHBOARDS for panel in panels(path) for target in panel["targets"]]
    for path in DASHBOARDS:
        variables = json.loads(path.read_text())["templating"]["list"]
        queries += [v["query"]["query"] for v in variables if v["type"] == "query"]
    return queries


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((CLUSTER / "prometheus" / "alerts.yaml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def lost(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """What of `ours` is not, or is otherwise, in `theirs`, which may have more."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found = [lost(value, theirs.get(key), f"{where}.{key}") for key, value in ours.items()]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        found = [lost(*pair, f"{where}[{i}]") for i, pair in enumerate(zip(ours, theirs, strict=True))]
    else:
        found = [] if ours == theirs else [[where]]
    return [path for paths in found for path in paths]


@functools.cache
def serve_metrics() -> set[str]:
    """Names in the source of the Ray Serve that is installed."""
    sources = (Path(serve.__file__).parent / "_private").rglob("*.py")
    return {name for path in sources for name in re.findall(r'"(serve_[a-z_]+)"', path.read_text())}


def metric_of(name: str) -> Metric | None:
    """The table's row that a name in a query belongs to; None if there is none."""
    table_name = name.removeprefix("ray_")
    base = re.sub(r"_(bucket|sum|count)$", "", table_name)
    metric = BY_NAME.get(base)
    if metric is None or (metric.kind is Kind.HISTOGRAM) != (base != table_name):
        return None
    on_fleet_page = not name.startswith("ray_")
    return None if on_fleet_page and metric.fleet is Fleet.NONE else metric


@pytest.mark.parametrize("query", [*dashboard_queries(), *(rule["expr"] for rule in rules())])
def test_a_query_asks_for_metrics_that_exist(query: str) -> None:
    names = re.findall(r"\b(?:ray_)?dspark_[a-z_]+", query)
    of_serve = re.findall(r"\bray_(serve_[a-z_]+)", query)
    assert names or of_serve or re.match(r"up\b", query)  # Prometheus' own
    for name in of_serve:  # Ray exports histograms and counters with a suffix
        assert re.sub(r"_(bucket|total)$", "", name) in serve_metrics(), name
    for name in names:
        metric = metric_of(name)
        assert metric is not None, name
        counted = re.search(rf"\b(?:rate|increase)\({name}\b", query) is not None
        assert counted == (metric.kind is not Kind.GAUGE), f"{name} is a {metric.kind}"


@pytest.mark.parametrize("query", [*dashboard_queries(), *(rule["expr"] for rule in rules())])
def test_a_query_is_one(query: str) -> None:
    """Variables as Grafana fills them in; what a variable's own query wraps is taken out of it."""
    filled = re.sub(r"^label_values\((.*), \w+\)$", r"\1", query).replace("$__rate_interval", "1m")
    promql_parser.parse(re.sub(r"\$(application|replica)", ".*", filled))


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_grafanas_own_types_know_every_field(path: Path) -> None:
    """Read into the types that Grafana publishes and written again: a key that they do not know is lost."""
    plugins.register_default_plugins()
    ours = json.loads(path.read_text())
    assert lost(ours, json.loads(JSONEncoder().encode(Dashboard.from_json(ours)))) == []
    misspelt = json.loads(path.read_text())
    misspelt["panels"][1]["fieldConfig"]["defaults"]["unti"] = "ms"
    again = json.loads(JSONEncoder().encode(Dashboard.from_json(misspelt)))
    assert lost(misspelt, again) == [".panels[1].fieldConfig.defaults.unti"]


@pytest.mark.parametrize("name", ["dspark_nothing", "ray_dspark_drafts", "dspark_draft_budget_tokens_bucket"])
def test_a_metric_that_does_not_exist_is_seen(name: str) -> None:
    assert metric_of(name) is None


def test_a_metric_that_serve_does_not_have_is_seen() -> None:
    assert "serve_deployment_queued_queries" in serve_metrics()
    assert "serve_nothing" not in serve_metrics()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_have_a_place_of_their_own(path: Path) -> None:
    everything = json.loads(path.read_text())["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    cells = [
        (x, y)
        for panel in everything
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_the_fleets_job_is_scraped_and_the_rules_loaded() -> None:
    config = yaml.safe_load((CLUSTER / "prometheus" / "prometheus.yaml").read_text())
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    asked = {job for query in dashboard_queries() for job in re.findall(r'job="([^"]+)"', query)}
    assert asked <= jobs
    assert config["rule_files"] == ["alerts.yaml"]


def test_every_alert_says_what_and_how_bad() -> None:
    for rule in rules():
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
    assert {rule["alert"] for rule in rules()} >= {
        "AcceptanceCollapse", "SpeculationOff", "PlanStale", "TableDrift", "KVPressure",
    }  # fmt: skip


def test_every_alert_is_tried_where_it_fires_and_where_not() -> None:
    document = yaml.safe_load(ALERT_TESTS.read_text())
    tried = [try_ for test in document["tests"] for try_ in test["alert_rule_test"]]
    names = {rule["alert"] for rule in rules()}
    assert {one["alertname"] for one in tried if "exp_alerts" in one} == names
    assert {one["alertname"] for one in tried if "exp_alerts" not in one} == names


def test_the_operators_page_says_what_to_do_about_every_alert() -> None:
    page = (CLUSTER.parent / "docs" / "operate.md").read_text()
    assert re.findall(r"^\| `([A-Za-z]+)` \|", page, re.MULTILINE) == [rule["alert"] for rule in rules()]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here")
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", CLUSTER / "prometheus" / "prometheus.yaml"),
        ("check", "rules", CLUSTER / "prometheus" / "alerts.yaml"),
        ("test", "rules", ALERT_TESTS),
    ],
    ids=lambda arguments: " ".join(map(str, arguments[:2])),
)
def test_prometheus_own_tool_agrees(arguments: tuple[str | Path, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
