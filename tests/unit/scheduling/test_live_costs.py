"""Step costs under live corrections."""

import numpy as np
import pytest

from dspark_ray.scheduling.live_costs import LiveCosts, StepSize
from dspark_ray.scheduling.step_table import StepTable


def live(**fields: object) -> LiveCosts:
    shape = {"rows": [1, 8, 64], "verify_ms": [10.0, 17.0, 73.0], "requests": [1, 8], "draft_ms": [2.0, 9.0]}
    return LiveCosts(StepTable(**{**shape, **fields}), 64, 4)  # type: ignore[arg-type]


def test_the_table_before_anything_is_known() -> None:
    costs = live()
    assert costs.curve(1, 0, 3, 0).tolist() == [10.0, 11.0, 12.0, 13.0]
    assert costs.curve(1, 0, 3, 0, draft_ms=5.0)[0] == 15.0
    assert costs.step_ms(StepSize(8, 7)) == 17.0


def test_a_draft_token_costs_more_the_longer_the_contexts() -> None:
    costs = live(context_ms_per_token=0.01, context_row_share=0.5)
    near, far = costs.curve(2, 0, 4, 0), costs.curve(2, 0, 4, 2 * 300)
    assert far - near == pytest.approx(6.0 + 0.01 * 300 * 0.5 * np.arange(5))  # 2 requests of 300 tokens
    step = StepSize(6, draft_rows=4, context_tokens=600)
    assert costs.step_ms(step) == pytest.approx(15.0 + 6.0 * (1 + 0.5 * 2))


def test_no_costs_past_the_rows_there_are() -> None:
    assert len(live().curve(60, 0, 100, 0)) == 5


def test_prefill_counts_by_what_a_draft_token_costs_beside_it() -> None:
    costs = live(rows=[1, 8, 64], verify_ms=[10.0, 10.0, 122.0])  # 2 ms a row from 8 rows on
    assert costs.curve(1, 20, 2, 0).tolist() == [10.0, 12.0, 14.0]
    assert costs.curve(1, 20, 2, 0, whole_step=True).tolist() == [36.0, 38.0, 40.0]


PROMPTS = {"prompt_rows": [1, 64], "prompt_ms": [8.0, 39.5]}  # half a millisecond a row


def test_prompts_have_a_price_of_their_own() -> None:
    costs = live(**PROMPTS)
    assert costs.step_ms(StepSize(8, 0, 20)) == pytest.approx(17.0 + 20 * 0.5)
    assert costs.step_ms(StepSize(0, 0, 20)) == pytest.approx(8.0 + 19 * 0.5)
    # A draft token costs beside a prompt what it costs alone: the prompt's price is linear.
    assert costs.curve(8, 20, 2, 0).tolist() == pytest.approx([17.0, 18.0, 19.0])
    assert costs.curve(8, 20, 2, 0, whole_step=True).tolist() == pytest.approx([27.0, 28.0, 29.0])


def test_long_prompts_do_not_change_what_decoding_costs() -> None:
    costs = live(**PROMPTS)
    for _ in range(200):
        costs.note_step(StepSize(8), 17.0)
        costs.note_step(StepSize(8, 0, 50), 17.0 + 50)  # twice the table's price, mostly prompt
        costs.note_step(StepSize(8, 0, 4), 17.0 + 4)  # mostly decoding: the prompts' part is known by now
    assert costs.step_ms(StepSize(8)) == pytest.approx(17.0, rel=0.02)
    assert costs.step_ms(StepSize(8, 0, 50)) == pytest.approx(67.0, rel=0.02)
    assert costs.curve(8, 0, 0, 0)[0] == pytest.approx(17.0, rel=0.02)


def test_decoding_is_learnt_from_steps_that_always_hold_a_prompt() -> None:
    costs = live(**PROMPTS)
    for _ in range(200):
        costs.note_step(StepSize(8, 0, 4), 2 * 17.0 + 2.0)
    assert costs.step_ms(StepSize(8)) == pytest.approx(34.0, rel=0.02)


def test_plain_and_speculating_steps_are_corrected_apart() -> None:
    costs = live()
    for _ in range(200):
        costs.note_step(StepSize(1), 10.0)
        costs.note_step(StepSize(4, 3), 26.0)  # twice the table's
    curve = costs.curve(1, 0, 3, 0)
    assert curve[0] == pytest.approx(10.0, rel=0.02)
    assert curve[3] == pytest.approx(26.0, rel=0.02)
    assert costs.step_ms(StepSize(4, 3)) == pytest.approx(26.0, rel=0.02)
    assert costs.step_ms(StepSize(4)) == pytest.approx(13.0, rel=0.02)
    assert (np.diff(curve) >= 0).all()


def test_drafting_is_corrected_too() -> None:
    costs = live(draft_fixed_ms=[1.0, 1.0])
    assert [costs.draft_ms(1, n) for n in (0, 2, 4)] == [1.0, 1.5, 2.0]
    for _ in range(200):
        costs.note_draft(1, 4, 3.0)
        costs.note_step(StepSize(1), 10.0)
    assert costs.draft_ms(1, 4) == pytest.approx(3.0, rel=0.02)
    assert costs.draft_ms(0, 4) == 0.0


def test_a_kind_never_seen_is_taken_as_the_other_one() -> None:
    costs = live()
    for _ in range(100):
        costs.note_step(StepSize(1), 5.0)
    assert costs.curve(1, 0, 3, 0) == pytest.approx([5.0, 5.5, 6.0, 6.5], rel=0.03)
