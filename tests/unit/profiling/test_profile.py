"""The profiler on a tiny engine, with a clock that charges for what it is told to charge."""

import numpy as np
import pytest

from dspark_ray.core.types import Request, SamplingParams
from dspark_ray.profiling.profile import ProfileSettings, profile_engine
from dspark_ray.profiling.step_timer import StepTimer, TargetStep
from tests.tiny_engine import tiny_engine

SETTINGS = ProfileSettings(rows=(1, 2, 4, 8, 32, 4096), requests=(1, 2, 4), rounds=2, max_s=60)


class TickingClock:
    """Moves by one at each look, so that every measurement takes one millisecond."""

    def __init__(self, step_ms: float = 1.0) -> None:
        self._now_ms, self._step_ms = 0.0, step_ms

    def now_ms(self) -> float:
        self._now_ms += self._step_ms
        return self._now_ms


def test_sizes_are_the_grid_up_to_the_limits() -> None:
    engine = tiny_engine(None, engine={"max_running": 6, "max_step_rows": 64})
    table = profile_engine(engine, settings=SETTINGS, made_from={"who": "test"})
    assert table.rows.tolist() == [1, 2, 4, 8, 32, 64]
    assert table.requests.tolist() == [1, 2, 4, 6]
    assert (table.verify_ms > 0).all()
    assert (table.draft_ms > 0).all()
    assert table.made_from == {"who": "test"}


def test_prompts_are_measured_by_steps_that_decide_nothing() -> None:
    engine = tiny_engine(None, engine={"max_step_rows": 64})
    timer = StepTimer(engine, TickingClock())
    step = timer.prompt_step(40, prompt_tokens=16)
    assert [work.num_rows for work in step.work] == [16, 16, 8]
    assert not any(work.needs_logits for work in step.work)
    assert timer.verify_ms(step) == 1.0
    timer.close()
    table = profile_engine(engine, settings=SETTINGS)
    assert table.prompt_rows.tolist() == [1, 8, 16, 32, 64]


def test_without_a_drafter_there_is_no_draft_cost() -> None:
    table = profile_engine(tiny_engine(None, speculation={"mode": "off"}), settings=SETTINGS)
    assert table.draft_cost_ms(4) == 0.0


def test_the_engine_is_as_before() -> None:
    engine = tiny_engine(None)
    profile_engine(engine, settings=SETTINGS)
    assert engine.pool.num_free == engine.pool.num_blocks
    assert engine.counters.target_steps == 0
    assert not engine.has_work()
    engine.add_request(Request("a", (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=4)))
    while engine.has_work():
        engine.step()
    assert engine.counters.emitted_tokens == 4


def test_a_busy_engine_is_not_profiled() -> None:
    engine = tiny_engine(None)
    engine.add_request(Request("a", (1, 2, 3), SamplingParams(max_tokens=4)))
    with pytest.raises(AssertionError, match="serving"):
        profile_engine(engine, settings=SETTINGS)


def test_progress_reaches_one() -> None:
    seen: list[float] = []
    profile_engine(tiny_engine(None), settings=SETTINGS, on_progress=seen.append)
    assert seen == [0.5, 1.0]


def test_a_slow_machine_measures_the_small_sizes_only() -> None:
    settings = ProfileSettings(rows=(1, 2, 4, 8, 16, 32), requests=(1,), rounds=5, max_s=0.001)
    engine = tiny_engine(None, engine={"max_step_rows": 64})
    table = profile_engine(engine, settings=settings, clock=TickingClock())
    assert table.rows.tolist() == [1, 2, 4, 8, 16]
    assert table.prompt_rows.tolist() == [1, 8, 16]


@pytest.mark.parametrize("num_rows", [1, 3, 7, 20, 30, 64])
def test_a_step_has_the_rows_that_were_asked_for(num_rows: int) -> None:
    engine = tiny_engine(None, engine={"max_running": 4, "max_step_rows": 64})
    timer = StepTimer(engine, TickingClock())
    step = timer.target_step(num_rows, context=16)
    assert sum(work.num_rows for work in step.work) == num_rows
    assert all(len(work.draft_tokens) == work.num_rows - 1 for work in step.work if work.decoding)
    assert timer.verify_ms(step) == 1.0
    timer.close()


def test_a_pool_too_small_is_shared() -> None:
    engine = tiny_engine(None, engine={"kv_num_blocks": 4, "max_running": 8}, model={"max_model_len": 16})
    timer = StepTimer(engine, TickingClock())
    step = timer.target_step(32, context=100)
    assert {block for work in step.work for block in work.sequence.blocks} <= set(range(4))
    assert timer.verify_ms(step) == 1.0
    timer.close()


def test_medians_are_monotone_and_the_context_is_taken_out() -> None:
    table = profile_engine(tiny_engine(None), settings=SETTINGS, clock=TickingClock())
    assert np.all(table.verify_ms == 1.0)  # every size costs one tick: a flat table
    assert table.context_ms_per_token == 0.0
    assert table.is_flat()


def test_what_further_rows_of_a_request_cost_of_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    def verify_ms(_: StepTimer, step: TargetStep) -> float:
        keys = [w.sequence.num_computed + w.num_rows for w in step.work if w.decoding]
        more = [w.num_rows - 1 for w in step.work if w.decoding]
        return 5.0 + 0.01 * sum(k * (1 + 0.4 * m) for k, m in zip(keys, more, strict=True))

    monkeypatch.setattr(StepTimer, "verify_ms", verify_ms)
    table = profile_engine(tiny_engine(None, engine={"kv_num_blocks": 512}), settings=SETTINGS)
    assert table.context_ms_per_token == pytest.approx(0.01)
    assert table.context_row_share == pytest.approx(0.4)
    assert table.verify_ms[:4] == pytest.approx(5.0, rel=0.1)  # small steps, whose requests are alike
