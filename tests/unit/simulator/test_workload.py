"""Arrivals: their rates, their order, and what is read from logs."""

import json
from pathlib import Path

import numpy as np
import pytest

from dspark_ray.core.errors import ArtefactError
from dspark_ray.core.step_record import RecordedRequest, RecordedStep, header
from dspark_ray.simulator.workload import (
    Batch,
    BurstyRate,
    ClosedWorkload,
    DiurnalRate,
    Lengths,
    OpenWorkload,
    TaskMix,
    read_arrivals,
)

MIX = TaskMix((3.0, 1.0), (Lengths(50), Lengths(10, 0.0)), (Lengths(100), Lengths(20, 0.0)))


def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def test_open_arrivals_keep_their_rate_and_order() -> None:
    workload = OpenWorkload(lambda now_ms: 20.0, MIX, rng())
    batches = [workload.take(until) for until in range(250, 200_001, 250)]
    times = np.concatenate([batch.arrival_ms for batch in batches])
    assert len(times) == pytest.approx(4000, rel=0.06)
    assert (np.diff(times) >= 0).all()
    assert all(
        len(b) == 0 or b.arrival_ms[-1] < until
        for b, until in zip(batches, range(250, 200_001, 250), strict=True)
    )


def test_tasks_have_their_shares_and_lengths() -> None:
    batch = MIX.draw(np.zeros(8000), rng())
    assert (batch.task == 0).mean() == pytest.approx(0.75, abs=0.02)
    assert batch.prompt_tokens[batch.task == 0].mean() == pytest.approx(50, rel=0.05)
    assert set(batch.output_tokens[batch.task == 1]) == {20}


@pytest.mark.parametrize(
    "lengths",
    [Lengths(50), Lengths(50, 0.3, 48), Lengths(60, 0.0, 48), Lengths(0.0, values=(3, 9, 200), most=100)],
)
def test_what_is_drawn_is_what_is_expected(lengths: Lengths) -> None:
    drawn = lengths.draw(20_000, rng())
    assert drawn.mean() == pytest.approx(lengths.expected, rel=0.02)
    assert drawn.max() <= lengths.most


def test_rates_that_change() -> None:
    day = DiurnalRate(10.0, 0.5, 100.0)
    assert (day(0.0), day(50_000.0)) == (pytest.approx(5.0), pytest.approx(15.0))
    bursty = BurstyRate(2.0, 10.0, calm_s=5.0, burst_s=5.0, rng=rng())
    assert {bursty(1000.0 * s) for s in range(60)} == {2.0, 20.0}


def test_a_closed_loop_asks_when_it_is_answered() -> None:
    requests = Batch(np.zeros(3), np.array([1, 2, 3]), np.array([4, 5, 6]), np.zeros(3, dtype=np.int64))
    workload = ClosedWorkload(2, MIX, rng(), requests)
    assert workload.take(1.0).prompt_tokens.tolist() == [1, 2]
    assert len(workload.take(2.0)) == 0
    asked = workload.finished(np.array([7.0, 8.0]))
    assert (asked.arrival_ms.tolist(), asked.output_tokens.tolist()) == ([7.0], [6])


def test_a_record_replays(tmp_path: Path) -> None:
    ended = (
        RecordedRequest(1, 1500.0, 1600.0, 1900.0, 30, 10, 7),
        RecordedRequest(0, 1000.0, None, 1900.0, 5, 0, 0),
    )
    step = RecordedStep(1900.0, 1.0, 1.0, 3, 1, 0, 0, 10, (), ended)
    (tmp_path / "r.jsonl").write_text(f"{header()}\n{step.to_line()}\n")
    batch = read_arrivals(tmp_path / "r.jsonl", ["chat"], speed=2.0)
    assert batch.arrival_ms.tolist() == [0.0, 250.0]
    assert batch.prompt_tokens.tolist() == [5, 20]
    assert batch.output_tokens.tolist() == [1, 7]


def test_plain_lines_replay_with_tasks(tmp_path: Path) -> None:
    rows = [{"arrived_ms": 9, "prompt_tokens": 2, "output_tokens": 3, "task": "code"}]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_arrivals(tmp_path / "r.jsonl", ["chat", "code"]).task.tolist() == [1]


@pytest.mark.parametrize("text", ["", "{}", "nonsense", '{"arrived_ms": 1, "prompt_tokens": 2}'])
def test_a_log_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.jsonl").write_text(text)
    with pytest.raises(ArtefactError):
        read_arrivals(tmp_path / "r.jsonl", ["chat"])
