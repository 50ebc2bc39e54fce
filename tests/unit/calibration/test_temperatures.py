"""The temperatures' file: what is refused, and what comes back."""

import numpy as np
import pytest

from dspark_ray.calibration.temperatures import Temperatures
from dspark_ray.core.errors import ArtefactError

MADE_FROM = {"target": "aa", "drafter": "bb"}


def temperatures() -> Temperatures:
    by_rule = {"greedy": np.array([1.1, 1.2]), "rejection": np.array([0.9, 1.4])}
    return Temperatures(by_rule, MADE_FROM, {"rejection": np.array([-0.3, 0.1])})


def test_round_trip(tmp_path):
    temperatures().save(tmp_path / "t.json")
    loaded = Temperatures.load(tmp_path / "t.json", expect=MADE_FROM)
    assert loaded.block_size == 2
    assert loaded.scaling("rejection").temperatures.tolist() == [0.9, 1.4]
    assert loaded.scaling("rejection").offsets.tolist() == [-0.3, 0.1]
    assert loaded.scaling("greedy").offsets.tolist() == [0.0, 0.0]
    assert loaded.made_from == MADE_FROM


def test_files_of_the_first_format_have_no_offsets(tmp_path):
    text = '{"format": "dspark-temperatures/1", "by_rule": {"greedy": [2.0, 3.0]}}'
    (tmp_path / "t.json").write_text(text)
    loaded = Temperatures.load(tmp_path / "t.json")
    assert loaded.scaling("greedy").temperatures.tolist() == [2.0, 3.0]
    assert loaded.scaling("greedy").offsets.tolist() == [0.0, 0.0]


def test_another_drafters_temperatures_are_refused(tmp_path):
    temperatures().save(tmp_path / "t.json")
    with pytest.raises(ArtefactError, match="drafter=bb, not cc; calibrate again"):
        Temperatures.load(tmp_path / "t.json", expect={"drafter": "cc"})
    with pytest.raises(ArtefactError, match="data"):
        Temperatures.load(tmp_path / "t.json", expect={"data": "x"})


def test_neutral_changes_nothing_and_knows_all_rules():
    neutral = Temperatures.neutral(3)
    for rule in ("greedy", "rejection", "shared_noise"):
        assert neutral.stand_in(rule) == rule
        assert neutral.scaling(rule).temperatures.tolist() == [1.0, 1.0, 1.0]
        assert neutral.scaling(rule).offsets.tolist() == [0.0, 0.0, 0.0]


def test_a_rule_that_was_not_calibrated_has_a_stand_in():
    assert temperatures().stand_in("shared_noise") == "rejection"
    assert temperatures().scaling("shared_noise").offsets.tolist() == [-0.3, 0.1]
    lacking = Temperatures({"rejection": np.full(2, 3.0)})
    assert lacking.stand_in("greedy") is None
    assert lacking.scaling("greedy").temperatures.tolist() == [1.0, 1.0]
    own = Temperatures({"rejection": np.full(2, 3.0), "shared_noise": np.full(2, 4.0)})
    assert own.scaling("shared_noise").temperatures.tolist() == [4.0, 4.0]


@pytest.mark.parametrize(
    "offsets",
    [{"greedy": [0.0]}, {"greedy": [float("inf"), 0.0]}, {"shared_noise": [0.0, 0.0]}, {"greedy": "no"}],
)
def test_offsets_that_do_not_fit_are_refused(offsets):
    with pytest.raises(ArtefactError):
        Temperatures({"greedy": [1.0, 1.0]}, {}, offsets)


@pytest.mark.parametrize(
    "by_rule",
    [
        {},
        {"greedily": [1.0]},
        {"greedy": []},
        {"greedy": [0.0]},
        {"greedy": [-1.0]},
        {"greedy": [float("nan")]},
        {"greedy": ["hot"]},
        {"greedy": [[1.0]]},
        {"greedy": [1.0], "rejection": [1.0, 1.0]},
    ],
)
def test_nonsense_is_refused(by_rule):
    with pytest.raises(ArtefactError):
        Temperatures(by_rule)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": "dspark-temperatures/2"}',
        '{"format": "dspark-temperatures/2", "by_rule": 3}',
        '{"format": "dspark-temperatures/2", "by_rule": {"greedy": [1.0]}, "offsets": [0.0]}',
        '{"format": "dspark-temperatures/3", "by_rule": {"greedy": [1.0]}}',
    ],
)
def test_a_damaged_file_is_refused(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ArtefactError, match=r"t\.json"):
        Temperatures.load(tmp_path / "t.json")


def test_vectors_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        temperatures().scaling("greedy").temperatures[0] = 2.0
