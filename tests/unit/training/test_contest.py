"""The contest of kinds: the same texts for all, in chunks, with a standing at any time."""

import json
from pathlib import Path

import pytest
import torch

from dspark_ray.core.errors import ConfigError
from dspark_ray.training.config import TrainingConfig
from dspark_ray.training.contest import contest_config, hold_contest, train_in_turn
from dspark_ray.training.sweep import sweep_configs
from dspark_ray.training.target import TransformersTarget


def test_kinds_share_all_but_what_is_theirs(tiny_run: TrainingConfig) -> None:
    configs = {kind: contest_config(tiny_run, kind) for kind in ("dspark", "dflash", "eagle3")}
    assert configs["dspark"].architecture == tiny_run.architecture
    for kind, config in configs.items():
        assert config.architecture.kind == kind
        assert config.architecture.block_size == tiny_run.architecture.block_size
        assert config.architecture.init_layers == (2,)
        assert config.cache.folder == tiny_run.cache.folder
        assert config.output == tiny_run.output / kind
    assert not configs["dflash"].architecture.sample_from_anchor


def test_a_contest_stops_and_goes_on(tiny_run: TrainingConfig) -> None:
    target = TransformersTarget(tiny_run.target)
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > 8

    first = hold_contest(tiny_run, target, stop=stop)
    assert not all(contestant.finished for contestant in first)
    second = hold_contest(tiny_run, target)
    assert [contestant.kind for contestant in second] == ["dspark", "dflash", "eagle3"]
    assert all(contestant.finished for contestant in second)
    assert len({contestant.blocks for contestant in second}) == 1  # the same texts, block for block
    for contestant in second:
        assert contestant.report is not None
        assert len(contestant.report.acceptance_sampling) == 3
        assert 1.0 <= contestant.report.tau_sampling <= 4.0
        assert Path(contestant.checkpoint, "model.safetensors").is_file()
        json.dumps(contestant.as_json())
    third = hold_contest(tiny_run, target, stop=lambda: True)
    assert list(map(repr, third)) == list(map(repr, second))  # NaN is not NaN; finished ones are not loaded
    weights = [torch.load(tiny_run.output / kind / "state.pt")["step"] for kind in ("dspark", "eagle3")]
    assert weights == [6, 6]


def test_a_sweep_changes_depth_and_length_alone(tiny_run: TrainingConfig) -> None:
    configs = sweep_configs(tiny_run, depths=[1, 3], lengths=[3, 5])
    shapes = ["1-layers-block-3", "3-layers-block-3", "1-layers-block-5"]
    assert list(configs) == [f"{kind}-{shape}" for shape in shapes for kind in ("dspark", "dflash")]
    assert len({config.output for config in configs.values()}) == 6
    deep = configs["dflash-3-layers-block-3"]
    assert deep.architecture.init_layers == (0, 1, 2)  # the target's last three
    assert (deep.cache, deep.architecture.target_layer_ids) == (
        configs["dspark-1-layers-block-5"].cache,
        tiny_run.architecture.target_layer_ids,
    )
    assert configs["dspark-1-layers-block-5"].architecture.block_size == 5
    with pytest.raises(ConfigError, match="depth of 4"):
        sweep_configs(tiny_run, depths=[4], lengths=[])


def test_a_sweep_trains_all_of_it_on_the_same_anchors(tiny_run: TrainingConfig) -> None:
    configs = sweep_configs(tiny_run, depths=[2], lengths=[2], kinds=["dspark"])
    standing = train_in_turn(configs, TransformersTarget(tiny_run.target))
    assert [(c.num_layers, c.block_size, c.finished) for c in standing] == [(2, 3, True), (1, 2, True)]
    assert len({c.steps for c in standing}) == 1
