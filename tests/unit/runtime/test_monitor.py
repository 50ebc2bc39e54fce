"""Metrics and log lines from snapshots, and the number of threads of an engine."""

import logging
from collections.abc import Mapping
from dataclasses import replace

import pytest

from dspark_ray.core.clock import ManualClock
from dspark_ray.core.config import parse_app_config
from dspark_ray.core.types import EngineStats, Request, SamplingParams
from dspark_ray.runtime.monitor import Monitor
from dspark_ray.runtime.threads import threads_per_engine
from tests.fakes import FakeEngine

CONFIG = parse_app_config({"serving": {"num_replicas": 2}})


class Sink:
    def __init__(self) -> None:
        self.counters: dict[str, float] = {}

    def inc(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        if not labels:
            self.counters[name] = self.counters.get(name, 0.0) + value

    def set(self, name: str, value: float, labels: Mapping[str, str]) -> None: ...

    def observe(self, name: str, value: float, labels: Mapping[str, str]) -> None: ...


def test_counters_follow_and_a_line_is_written_when_something_happened(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("dspark_ray"), "propagate", True)
    clock, engine, sink = ManualClock(), FakeEngine(CONFIG, step_ms=0.0), Sink()

    def read() -> EngineStats:
        return replace(engine.stats(), ready=True)

    monitor = Monitor(read, sink, log_interval_s=10.0, clock=clock)
    with caplog.at_level(logging.INFO):
        clock.advance(11_000)
        monitor.tick()
        assert caplog.messages == []
        engine.add_request(Request("r", (5, 6), SamplingParams(max_tokens=6)))
        engine.step()
        monitor.tick()
        engine.step()
        clock.advance(10_000)
        monitor.tick()
    assert sink.counters["dspark_emitted_tokens_total"] == 6
    assert sink.counters["dspark_drafts_total"] == 2
    (line,) = caplog.messages
    assert "tau 3.00" in line


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (2, 1), (8, 4), (9, 4)])
def test_replicas_share_the_cores(cores: int, expected: int) -> None:
    assert threads_per_engine(CONFIG, cores) == expected


def test_ranks_share_the_cores_too() -> None:
    config = parse_app_config({"engine": {"tensor_parallel_size": 4}, "serving": {"num_replicas": 2}})
    assert threads_per_engine(config, 64) == 8


def test_a_configured_number_of_threads_wins() -> None:
    config = parse_app_config({"engine": {"num_threads": 3}, "serving": {"num_replicas": 2}})
    assert threads_per_engine(config, 64) == 3
