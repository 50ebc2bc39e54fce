"""The timed engine: the table's times, the model's acceptance, and everything else the real engine's."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_ray.core.clock import ManualClock
from dspark_ray.core.config import for_replica, parse_app_config, with_absolute_paths
from dspark_ray.core.errors import ArtefactError, ConfigError
from dspark_ray.core.types import Request, SamplingParams, StepPlan
from dspark_ray.engine.timed import TimedEngine, build_timed_engine, token_at
from dspark_ray.scheduling.step_table import StepTable

TABLE = StepTable(
    rows=[1, 4, 8, 16, 64], verify_ms=[10.0, 10.5, 12.0, 17.0, 50.0], requests=[1, 8], draft_ms=[1.0, 2.0]
)


class Bench:
    def __init__(self, folder: Path, mode: str = "adaptive", **timed: Any) -> None:
        TABLE.save(folder / "table.json")
        self.clock = ManualClock()
        engine = {"kind": "timed", "timed": {"step_tables": [str(folder / "table.json")], **timed}}
        speculation = {"mode": mode, "num_draft_tokens": 4}
        self.config = parse_app_config({"engine": engine, "speculation": speculation})
        self.engine: TimedEngine = build_timed_engine(
            self.config, "one", self.clock, lambda seconds: self.clock.advance(1e3 * seconds)
        )

    def run(self, num_requests: int, num_tokens: int) -> dict[str, list[int]]:
        """Requests with prompts of five tokens → their answers."""
        texts: dict[str, list[int]] = {}
        for number in range(num_requests):
            sampling = SamplingParams(temperature=0.7, max_tokens=num_tokens, stop_token_ids=(token_at(6),))
            self.engine.add_request(Request(f"r{number}.1", (1, 2, 3, 4, 5), sampling))
            texts[f"r{number}.1"] = []
        while self.engine.has_work():
            for output in self.engine.step():
                texts[output.request_id] += output.token_ids
        return texts


def test_steps_last_as_long_as_the_table_says(tmp_path: Path) -> None:
    bench = Bench(tmp_path, mode="off")
    bench.run(2, 11)
    assert bench.clock.now_ms() == pytest.approx(TABLE.verify_cost_ms(10) + 10 * TABLE.verify_cost_ms(2))
    assert bench.engine.stats().step_measured_ms == pytest.approx(10.2, abs=0.5)


def test_the_programs_own_time_is_part_of_a_step_and_idleness_is_not(tmp_path: Path) -> None:
    bench = Bench(tmp_path, mode="off")
    bench.engine.add_request(Request("r", (1,), SamplingParams(max_tokens=3)))
    for own_ms, expected_ms in ((0.0, 10.0), (4.0, 20.0), (500.0, 524.0 + 6.0)):
        bench.clock.advance(own_ms)
        bench.engine.step()
        assert bench.clock.now_ms() == pytest.approx(expected_ms)


def test_answers_have_their_length_whatever_is_drafted(tmp_path: Path) -> None:
    plain, drafted = (Bench(tmp_path, mode=mode).run(6, 40) for mode in ("off", "adaptive"))
    assert plain == drafted
    assert plain["r0.1"] == [token_at(5 + n) for n in range(40)]


def test_tokens_are_accepted_as_the_model_says(tmp_path: Path) -> None:
    bench = Bench(tmp_path, mode="fixed", acceptance=[[0.9, 0.5]])
    bench.run(30, 100)
    counters = bench.engine.counters
    assert counters.drafted_tokens == counters.verified_tokens + counters.trimmed_tokens
    expected = np.cumprod([0.9, 0.5, 0.5, 0.5])
    np.testing.assert_allclose(counters.acceptance_per_position, expected, atol=0.04)


def test_adaptive_budgets_differ_and_trim(tmp_path: Path) -> None:
    bench = Bench(tmp_path, acceptance=[[0.95, 0.9, 0.9, 0.9], [0.3, 0.2, 0.1, 0.1]])
    bench.run(4, 80)
    counters = bench.engine.counters
    assert counters.accepted_tokens > 0
    assert counters.trimmed_tokens > 0
    assert len({step.budget_tokens for step in bench.engine.recent_steps()}) > 2


def test_each_request_is_of_one_kind(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps([[0.0], [1.0]]))
    bench = Bench(tmp_path, mode="fixed", acceptance_trace=str(trace), concentration=None)
    ends = {}
    for number in range(12):
        bench.engine.add_request(Request(f"r{number}.1", (1, 2), SamplingParams(max_tokens=31)))
    while bench.engine.has_work():
        for output in bench.engine.step():
            if output.usage is not None:
                ends[output.request_id] = output.usage.accepted_tokens
    assert set(ends.values()) == {0, 24}


def test_a_group_waits_for_its_step_time(tmp_path: Path) -> None:
    bench = Bench(tmp_path, mode="off")
    bench.engine.apply_plan(StepPlan("one", 1, 1, "lockstep", ttl_ms=1e6, group_step_ms=30.0))
    bench.engine.add_request(Request("r", (1,), SamplingParams(max_tokens=4)))
    for _ in range(4):
        bench.engine.step()
    assert bench.clock.now_ms() == pytest.approx(3 * 30.0 + 10.0)


def test_it_is_labelled(tmp_path: Path) -> None:
    engine = Bench(tmp_path).engine
    assert engine.stats().kind == "timed"
    assert "simulated" in engine.describe()["target"]


def test_wrong_files_and_configurations_are_named(tmp_path: Path) -> None:
    (tmp_path / "wrong.json").write_text('[[0.5, "x"]]')
    with pytest.raises(ArtefactError, match=r"wrong\.json is no acceptance trace"):
        Bench(tmp_path, acceptance_trace=str(tmp_path / "wrong.json"))
    with pytest.raises(ConfigError, match="give both or neither"):
        parse_app_config({"engine": {"kind": "timed"}})
    absent = {"engine": {"kind": "timed", "timed": {"step_tables": ["absent.json"]}}}
    with pytest.raises(ConfigError, match=r"engine\.timed\.step_tables: 'absent.json'"):
        with_absolute_paths(parse_app_config(absent), (tmp_path,))


def test_replicas_have_tables_in_turn(tmp_path: Path) -> None:
    timed = {"step_tables": ["a.json", "b.json"]}
    config = parse_app_config({"engine": {"kind": "timed", "timed": timed}})
    found = [for_replica(config, rank).engine.timed for rank in range(3)]
    assert [one.step_tables for one in found if one] == [("a.json",), ("b.json",), ("a.json",)]
    assert for_replica(parse_app_config({}), 5) == parse_app_config({})
