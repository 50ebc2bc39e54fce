"""The contest of kinds: the same texts for all, in chunks, with a standing at any time."""

import json
from pathlib import Path

import torch

from dspark_ray.training.config import TrainingConfig
from dspark_ray.training.contest import contest_config, hold_contest
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
    weights = [torch.load(tiny_run.output / kind / "state.pt")["step"] for kind in ("dspark", "eagle3")]
    assert weights == [6, 6]
