"""A line a step: what is recorded adds up to what the engine counts, and the simulator can read it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dspark_ray.core.clock import ManualClock
from dspark_ray.core.errors import ArtefactError, ConfigError
from dspark_ray.core.step_record import RecordedRequest, RecordedStep, header, read_steps
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.recorder import StepRecorder
from dspark_ray.scheduling.live_costs import StepSize
from dspark_ray.simulator.acceptance import conditional_acceptance, recorded_blocks
from dspark_ray.simulator.calibrate import measured_times
from dspark_ray.simulator.step_times import Disturbances
from dspark_ray.simulator.workload import read_arrivals
from tests.tiny_engine import STEEP_TABLE, request, run, tiny_drafter_dir, tiny_engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drafter_dir(tmp_path_factory.mktemp("drafter"), 5, draft_vocab=None)


def recorded(checkpoint: Path, folder: Path, mode: str) -> tuple[Engine, Path]:
    """Six requests through an engine with a recorder; → the engine and the file."""
    engine = tiny_engine(checkpoint, speculation={"mode": mode})
    engine.recorder = StepRecorder(folder, "engine/1", ManualClock())
    run(engine, [request(f"r{n}", [1, 2, n % 5], temperature=1.0, max_tokens=30, seed=n) for n in range(6)])
    return engine, engine.recorder.path


@pytest.mark.parametrize("mode", ["fixed", "adaptive"])
def test_the_lines_add_up(checkpoint: Path, tmp_path: Path, mode: str) -> None:
    engine, path = recorded(checkpoint, tmp_path / mode, mode)
    assert path.name == "engine_1.jsonl"
    steps, counters = list(read_steps(path)), engine.counters
    drafts = [draft for step in steps for draft in step.drafts]
    assert len(steps) == counters.target_steps
    assert sum(step.verified_tokens for step in steps) == counters.verified_tokens > 0
    assert sum(draft.accepted for draft in drafts) == counters.accepted_tokens > 0
    ended = [request for step in steps for request in step.ended]
    assert sorted(request.request for request in ended) == list(range(6))
    assert sum(request.output_tokens for request in ended) == counters.emitted_tokens
    assert {request.prompt_tokens for request in ended} == {3}


def test_an_aborted_request_ends_in_the_next_line(checkpoint: Path, tmp_path: Path) -> None:
    engine = tiny_engine(checkpoint)
    engine.recorder = StepRecorder(tmp_path, "e", ManualClock())
    for name in ("kept", "gone"):
        engine.add_request(request(name, [1, 2], max_tokens=4))
    engine.step()
    engine.abort("gone")
    while engine.has_work():
        engine.step()
    ended = [r.request for step in read_steps(engine.recorder.path) for r in step.ended]
    assert ended == [1, 0]


def test_the_simulator_reads_what_was_recorded(checkpoint: Path, tmp_path: Path) -> None:
    engine, path = recorded(checkpoint, tmp_path, "fixed")
    blocks = recorded_blocks([path], 4, np.random.default_rng(0))
    first = engine.counters.acceptance_per_position[0]
    # Drafts that were cut by the end of their request are completed by their confidences.
    assert conditional_acceptance(blocks)[0] == pytest.approx(first, abs=0.08)
    assert len(read_arrivals(path, ["chat"])) == 6


def test_recorded_times_correct_a_table() -> None:
    steps = [RecordedStep(1.0, 2 * STEEP_TABLE.verify_cost_ms(8), 1.0, 8, 8, 0, 0, 0)] * 200
    times = measured_times(STEEP_TABLE, [steps], 4)
    assert times.step_ms(StepSize(8)) == pytest.approx(2 * STEEP_TABLE.verify_cost_ms(8), rel=0.05)


def test_recorded_prompts_and_drafts_correct_their_own_curves() -> None:
    table, plain_ms = STEEP_TABLE, STEEP_TABLE.verify_cost_ms(8)
    mixed_ms = plain_ms + 0.5 * table.added_prompt_ms(8, 24)
    draft_ms = 3 * table.draft_cost_ms(8)
    steps = [
        RecordedStep(1.0, plain_ms + draft_ms, 1.0, 8, 8, 0, 8, 0, draft_tokens=4, draft_ms=draft_ms),
        RecordedStep(1.0, mixed_ms, 1.0, 32, 8, 0, 0, 0),
    ]
    times = measured_times(table, [steps * 50], 4)
    assert times.step_ms(StepSize(8)) == pytest.approx(plain_ms)
    assert times.step_ms(StepSize(8, prompt_rows=24)) == pytest.approx(mixed_ms)
    assert times.draft_ms(8, 1.0) == pytest.approx(draft_ms)


def test_steps_with_draft_tokens_have_times_of_their_own() -> None:
    table, rows = STEEP_TABLE, 8
    plain_ms, dear_ms = table.verify_cost_ms(rows), 1.2 * table.verify_cost_ms(rows)
    plain = [RecordedStep(1.0, plain_ms, 1.0, rows, rows, 0, 0, 0)] * 20
    speculating = [RecordedStep(1.0, dear_ms, 1.0, rows, 4, 4, 0, 0)] * 20
    times = measured_times(table, [[*plain, *speculating]], 4)
    assert times.step_ms(StepSize(rows)) == pytest.approx(plain_ms)
    assert times.step_ms(StepSize(rows, draft_rows=4)) == pytest.approx(dear_ms)
    # A kind of which nothing was recorded is taken for the other one.
    for half, size in ((plain, StepSize(rows, draft_rows=4)), (speculating, StepSize(rows))):
        expected_ms = plain_ms if half is plain else dear_ms
        assert measured_times(table, [half], 4).step_ms(size) == pytest.approx(expected_ms)


def test_scatter_and_the_time_between_steps_are_kept() -> None:
    table, mean_ms = STEEP_TABLE, STEEP_TABLE.verify_cost_ms(4)
    steps, now_ms = [], 0.0
    for number in range(40):
        measured_ms = mean_ms * (1.1 if number % 2 else 0.9)
        now_ms += measured_ms + 2.0  # between two steps, a half of it for the record
        steps.append(RecordedStep(now_ms, measured_ms, 1.0, 4, 4, 0, 0, 0, recording_ms=1.0))
    now_ms += 500.0  # nobody is there
    steps.append(RecordedStep(now_ms + mean_ms, mean_ms, 1.0, 4, 4, 0, 0, 0))
    first = RecordedRequest(0, 0.0, 1.0, steps[-2].ended_ms, 1, 0, 1)
    last = RecordedRequest(1, now_ms, 1.0, now_ms + mean_ms, 1, 0, 1)
    steps[-2], steps[-1] = replace(steps[-2], ended=(first,)), replace(steps[-1], ended=(last,))
    times = measured_times(table, [steps], 4)
    assert (times.between_ms, times.between_ms_per_request) == (pytest.approx(1.0), 0.0)
    longer = [
        replace(step, num_decoding=40, ended_ms=3 * step.ended_ms, measured_ms=3 * step.measured_ms)
        for step in steps[:-1]
    ]
    longer[-1] = replace(longer[-1], ended=(replace(first, ended_ms=longer[-1].ended_ms),))
    both = measured_times(table, [steps, longer], 4)  # 6 ms in all between two of these, 1 ms for the record
    assert both.pause_ms(4) == pytest.approx(1.0)
    assert both.pause_ms(40) == pytest.approx(5.0)
    np.testing.assert_allclose(times.scatter[:4], [0.9, 1.1, 0.9, 1.1], rtol=1e-3)
    way = Disturbances(times.scatter, np.random.default_rng(0))
    assert {round(way.next(), 1) for _ in range(50)} == {0.9, 1.0, 1.1}


def test_the_time_that_a_line_takes_is_told_in_the_next(checkpoint: Path, tmp_path: Path) -> None:
    class Ticking(ManualClock):
        def now_ms(self) -> float:
            self.advance(1.0)
            return super().now_ms()

    engine = tiny_engine(checkpoint)
    engine.recorder = StepRecorder(tmp_path, "e", Ticking())
    run(engine, [request("r", [1, 2], max_tokens=4)])
    told = [step.recording_ms for step in read_steps(engine.recorder.path)]
    assert told[0] == 0.0
    assert set(told[1:]) == {1.0}


def test_a_file_that_is_no_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    for text in ("", "{}\n", header() + "\n{}\n" + header() + "\n"):
        path.write_text(text)
        with pytest.raises(ArtefactError):
            list(read_steps(path))


def test_a_last_line_cut_short_is_left_out(tmp_path: Path) -> None:
    step = RecordedStep(1.0, 1.0, 1.0, 8, 4, 0, 0, 0)
    path = tmp_path / "r.jsonl"
    path.write_text(f"{header()}\n{step.to_line()}\n{step.to_line()[:30]}")
    assert list(read_steps(path)) == [step]


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="record_path"):
        StepRecorder(tmp_path / "file", "e", ManualClock())


def test_details_add_up_and_only_come_when_asked(checkpoint: Path) -> None:
    engine = tiny_engine(checkpoint, speculation={"mode": "adaptive"})
    asked = replace(request("asked", [1, 2, 3], max_tokens=40, seed=1), speculation_details=True)
    engine.add_request(asked)
    engine.add_request(request("silent", [1, 2, 3], max_tokens=40, seed=2))
    outputs = [output for _ in iter(engine.has_work, False) for output in engine.step()]
    assert all(output.details is None for output in outputs if output.request_id == "silent")
    mine = [output for output in outputs if output.request_id == "asked"]
    usage = mine[-1].usage
    assert usage is not None
    details = [output.details for output in mine]
    assert all(detail is not None for detail in details)
    assert sum(d.verified for d in details if d) == usage.verified_tokens > 0
    assert sum(len(d.survival) for d in details if d) == usage.verified_tokens
    assert sum(d.accepted for d in details if d) >= usage.accepted_tokens > 0
    for output in mine[:-1]:
        assert output.details is not None
        assert len(output.token_ids) == output.details.accepted + 1
