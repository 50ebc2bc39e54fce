"""The temperatures' file: what is refused, and what comes back."""

import numpy as np
import pytest

from dspark_ray.calibration.temperatures import Temperatures
from dspark_ray.core.errors import ArtefactError

MADE_FROM = {"target": "aa", "drafter": "bb"}


def temperatures() -> Temperatures:
    return Temperatures({"greedy": np.array([1.1, 1.2]), "rejection": np.array([0.9, 1.4])}, MADE_FROM)


def test_round_trip(tmp_path):
    temperatures().save(tmp_path / "t.json")
    loaded = Temperatures.load(tmp_path / "t.json", expect=MADE_FROM)
    assert loaded.block_size == 2
    assert loaded.for_rule("rejection").tolist() == [0.9, 1.4]
    assert loaded.made_from == MADE_FROM


def test_another_drafters_temperatures_are_refused(tmp_path):
    temperatures().save(tmp_path / "t.json")
    with pytest.raises(ArtefactError, match="drafter=bb, not cc; calibrate again"):
        Temperatures.load(tmp_path / "t.json", expect={"drafter": "cc"})
    with pytest.raises(ArtefactError, match="data"):
        Temperatures.load(tmp_path / "t.json", expect={"data": "x"})


def test_neutral_changes_nothing_and_knows_both_rules():
    neutral = Temperatures.neutral(3)
    assert neutral.for_rule("greedy").tolist() == neutral.for_rule("rejection").tolist() == [1.0, 1.0, 1.0]


def test_a_rule_that_was_not_calibrated_is_named():
    with pytest.raises(ArtefactError, match="'greedy'"):
        Temperatures({"rejection": np.ones(2)}).for_rule("greedy")


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
    ["", "[]", '{"format": "dspark-temperatures/1"}', '{"format": "dspark-temperatures/1", "by_rule": 3}'],
)
def test_a_damaged_file_is_refused(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ArtefactError, match=r"t\.json"):
        Temperatures.load(tmp_path / "t.json")


def test_vectors_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        temperatures().for_rule("greedy")[0] = 2.0
