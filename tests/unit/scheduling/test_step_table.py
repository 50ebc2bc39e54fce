"""The step table: stairs, interpolation, validation, and its file."""

import json

import numpy as np
import pytest

from dspark_ray.core.errors import ArtefactError
from dspark_ray.scheduling.correction import OnlineCorrection
from dspark_ray.scheduling.step_table import StepTable, cost_curve

MADE_FROM = {"target": "aa", "drafter": "bb", "hardware": "cpu-2", "dtype": "bfloat16", "threads": 2}


def table(**changes) -> StepTable:
    fields = {
        "rows": [1, 4, 8, 16, 32],
        "verify_ms": [10.0, 12.0, 14.0, 30.0, 62.0],
        "staircase_rows": 8,
        "requests": [1, 4, 8],
        "draft_ms": [2.0, 5.0, 9.0],
        "made_from": MADE_FROM,
    }
    return StepTable(**{**fields, **changes})


def test_up_to_the_largest_graph_the_next_size_is_paid():
    assert [table().verify_cost_ms(n) for n in (1, 2, 4, 5, 8)] == [10.0, 12.0, 12.0, 14.0, 14.0]


def test_above_the_largest_graph_costs_are_interpolated_and_never_across_it():
    # Between 8 and 16 a line from the graph's 14 ms would be too cheap: the step is not captured.
    assert [table().verify_cost_ms(n) for n in (9, 15, 16, 24, 32)] == [30.0, 30.0, 30.0, 46.0, 62.0]


def test_without_graphs_costs_are_interpolated_everywhere():
    costs = table(staircase_rows=0).verify_cost_ms(np.array([1, 2, 4, 6, 12]))
    np.testing.assert_allclose(costs, [10.0, 10.0 + 2 / 3, 12.0, 13.0, 22.0])


def test_beyond_the_grid_the_last_slope_goes_on():
    assert table().verify_cost_ms(48) == pytest.approx(62.0 + 16 * 2.0)
    assert table(staircase_rows=32).verify_cost_ms(48) == pytest.approx(62.0 + 16 * 2.0)
    assert StepTable(rows=[4], verify_ms=[7.0]).verify_cost_ms(np.array([1, 400])).tolist() == [7.0, 7.0]


def test_context_is_billed_per_token():
    assert table(context_ms_per_token=0.001).verify_cost_ms(4, context_tokens=3000) == pytest.approx(15.0)


def test_further_rows_of_a_request_share_its_context():
    costs = table(context_ms_per_token=0.001, context_row_share=0.5)
    assert costs.verify_cost_ms(4, 3000) == pytest.approx(12.0 + 3.0)  # four requests
    assert costs.verify_cost_ms(4, 3000, 1) == pytest.approx(12.0 + 3.0 * (1 + 0.5 * 3))
    assert costs.step_cost_ms(4, 0, 3000, 2) == pytest.approx(12.0 + 3.0 * 1.5)
    assert StepTable.from_dict(costs.to_dict()).context_row_share == 0.5


def test_prompts_add_what_their_rows_cost_in_the_layers():
    cheap = table(prompt_rows=[1, 17, 33], prompt_ms=[8.0, 16.0, 32.0])
    assert cheap.prompt_cost_ms(9) == pytest.approx(12.0)
    assert cheap.prompt_cost_ms(np.array([1, 65])).tolist() == [8.0, 64.0]  # the last slope goes on
    assert cheap.step_cost_ms(8, 0) == cheap.verify_cost_ms(8)
    assert cheap.step_cost_ms(0, 17) == 16.0
    assert cheap.step_cost_ms(1, 16) == pytest.approx(10.0 + 16.0 - 8.0)
    assert cheap.prompt_row_ms(33) == pytest.approx((32.0 - 8.0) / 32)
    assert StepTable.from_dict(cheap.to_dict()).digest == cheap.digest != table().digest


def test_without_a_curve_prompts_cost_what_decoding_rows_do():
    assert table().step_cost_ms(4, 20) == table().verify_cost_ms(24)
    assert table().step_cost_ms(0, 20) == table().verify_cost_ms(20)
    old = {k: v for k, v in table().to_dict().items() if not k.startswith("prompt")}
    assert StepTable.from_dict(old).digest == table().digest


def test_draft_cost():
    assert [table().draft_cost_ms(n) for n in (0, 1, 2, 8, 12)] == [0.0, 2.0, 3.0, 9.0, 13.0]
    assert table(requests=[], draft_ms=[]).draft_cost_ms(3) == 0.0


def test_a_shorter_block_costs_less_to_draft():
    assert table().draft_cost_ms(8, 0.25) == table().draft_cost_ms(2)  # fewer rows: as fewer requests
    fixed = table(draft_fixed_ms=[1.0, 1.0, 5.0])
    assert [fixed.draft_cost_ms(1, share) for share in (0.0, 0.5, 1.0)] == [1.0, 1.5, 2.0]
    assert fixed.draft_cost_ms(8, 0.5) == 7.0
    assert StepTable.from_dict(fixed.to_dict()).digest == fixed.digest


def test_noise_is_made_monotone_and_arrays_cannot_be_changed():
    noisy = table(verify_ms=[10.0, 9.0, 14.0, 13.0, 62.0])
    assert noisy.verify_ms.tolist() == [10.0, 10.0, 14.0, 14.0, 62.0]
    with pytest.raises(ValueError, match="read-only"):
        noisy.verify_ms[0] = 1.0


def test_cost_never_falls_with_rows():
    costs = table().verify_cost_ms(np.arange(1, 100))
    assert (np.diff(costs) >= 0).all()


def test_flat():
    assert not table().is_flat()
    flat = StepTable(rows=[1, 64], verify_ms=[10.0, 10.2])
    assert flat.is_flat()
    assert "FLAT" in flat.summary()


def test_summary_is_one_line_with_the_digest():
    assert table().digest in table().summary()
    assert "\n" not in table().summary()


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": [], "verify_ms": []},
        {"rows": [1, 4], "verify_ms": [1.0]},
        {"rows": [4, 1], "verify_ms": [1.0, 2.0]},
        {"rows": [1, 1], "verify_ms": [1.0, 2.0]},
        {"rows": [0, 1], "verify_ms": [1.0, 2.0]},
        {"rows": [1.5, 2], "verify_ms": [1.0, 2.0]},
        {"verify_ms": [10.0, float("nan"), 14.0, 30.0, 62.0]},
        {"verify_ms": [10.0, float("inf"), 14.0, 30.0, 62.0]},
        {"verify_ms": [-1.0, 12.0, 14.0, 30.0, 62.0]},
        {"verify_ms": [0.0, 12.0, 14.0, 30.0, 62.0]},
        {"verify_ms": ["fast", 12.0, 14.0, 30.0, 62.0]},
        {"rows": [[1], [2]], "verify_ms": [[1.0], [2.0]]},
        {"staircase_rows": 7},
        {"requests": [1], "draft_ms": [float("nan")]},
        {"requests": [2, 1], "draft_ms": [1.0, 1.0]},
        {"prompt_rows": [1, 8], "prompt_ms": [1.0]},
        {"prompt_rows": [8, 1], "prompt_ms": [1.0, 2.0]},
        {"context_ms_per_token": -0.1},
        {"context_ms_per_token": float("nan")},
        {"context_row_share": 1.5},
        {"context_row_share": float("nan")},
    ],
)
def test_nonsense_is_refused(changes):
    with pytest.raises(ArtefactError):
        table(**changes)


def test_file_round_trip(tmp_path):
    path = tmp_path / "deep" / "table.json"
    table().save(path)
    loaded = StepTable.load(path, expect=MADE_FROM)
    assert loaded.digest == table().digest
    assert loaded.to_dict() == table().to_dict()
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]


def test_digest_covers_the_content():
    digests = {table().digest, table(staircase_rows=0).digest, table(made_from={}).digest}
    assert len(digests) == 3


def test_a_table_made_for_something_else_is_refused_by_key(tmp_path):
    path = tmp_path / "table.json"
    table().save(path)
    with pytest.raises(ArtefactError, match="threads=2, not 8"):
        StepTable.load(path, expect={**MADE_FROM, "threads": 8})
    with pytest.raises(ArtefactError, match="driver"):
        StepTable.load(path, expect={"driver": "x"})


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": "other/1"}'])
def test_a_damaged_file_is_refused(tmp_path, text):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ArtefactError, match="table"):
        StepTable.load(path)


def test_unknown_keys_are_refused(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({**table().to_dict(), "surprise": 1}))
    with pytest.raises(ArtefactError, match="surprise"):
        StepTable.load(path)
    with pytest.raises(ArtefactError, match="missing"):
        StepTable.from_dict({"format": "dspark-step-table/1", "rows": [1]})


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ArtefactError, match="no-such"):
        StepTable.load(tmp_path / "no-such.json")


def test_cost_curve_adds_drafting_once_and_follows_the_correction():
    plain = cost_curve(table(), None, base_rows=2, max_draft_tokens=4, num_drafting=2)
    np.testing.assert_allclose(plain, np.array([12.0, 12.0, 12.0, 14.0, 14.0]) + 3.0)
    correction = OnlineCorrection()
    for _ in range(100):
        correction.update(4, 12.0, 18.0)
    corrected = cost_curve(table(), correction, base_rows=2, max_draft_tokens=4, num_drafting=0)
    np.testing.assert_allclose(corrected[0], 18.0, rtol=0.02)
    assert (np.diff(corrected) >= 0).all()
