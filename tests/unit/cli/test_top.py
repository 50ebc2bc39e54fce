"""The live view: rates from two looks, dashes where nothing happened."""

from dataclasses import replace

import pytest

from dspark_ray.cli.top import View, parse, spark
from dspark_ray.core.types import EngineStats, SpeculationCounters
from dspark_ray.observability.fleet_page import fleet_page

HEALTH = {
    "model": "m",
    "status": "ready",
    "replicas": {"ready": 1, "expected": 2},
    "speculation": {"mode": "adaptive"},
}


def page(**counters: int) -> str:
    made = SpeculationCounters(2, **counters)
    made = replace(made, verified_per_position=[10, 4], accepted_per_position=[5, 1])
    stats = EngineStats("e", made, 3, 1, 10, 40, budget_tokens=2.5, step_measured_ms=9.0)
    return fleet_page([stats], {})


def test_two_looks_make_rates() -> None:
    view = View()
    view.add(parse(page(emitted_tokens=100, decode_tokens=90, request_steps=50)), HEALTH, 0.0)
    view.add(parse(page(emitted_tokens=150, decode_tokens=150, request_steps=90)), HEALTH, 0.5)
    shown = dict(view.figures())
    assert view.speeds[-1] == pytest.approx(100.0)
    assert shown["τ"] == "1.50"
    assert shown["accepted of verified"] == "–"
    assert shown["running, waiting"] == "3, 1"
    assert shown["KV blocks"] == "10 of 40"
    assert shown["plans"].startswith("none")
    assert shown["replicas"] == "1 ready of 2"
    assert shown["draft budget"].startswith("     2.5")


def test_acceptance_by_position_is_of_the_window() -> None:
    view = View()
    before = {**parse(page()), ("dspark_verified_per_position_total", "1"): 0.0}
    before |= {("dspark_accepted_per_position_total", "1"): 0.0}
    view.add(before, HEALTH, 0.0)
    view.add(parse(page()), HEALTH, 1.0)
    assert view.acceptance() == [0.5, None]


def test_bars() -> None:
    assert spark([0.0, 4.0, 8.0]) == "▁▅█"
    assert spark([0.0]) == spark([]) == ""
