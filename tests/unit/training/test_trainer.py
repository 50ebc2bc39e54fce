"""Whole runs on a tiny target: learning, resuming to the same curve, warm starts, clean stops."""

import json
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from dspark_ray.core.errors import ArtefactError, ConfigError, DataError
from dspark_ray.models.drafters.checkpoint import D2T_TENSOR, load_checkpoint
from dspark_ray.training.cache import CachedSequence
from dspark_ray.training.config import (
    ArchitectureConfig,
    OptimizerConfig,
    TrainingConfig,
    load_training_config,
)
from dspark_ray.training.learner import Learner, NonFiniteLossError, learning_rate
from dspark_ray.training.observer import Observer
from dspark_ray.training.target import TransformersTarget
from dspark_ray.training.trainer import Run, _StopSignal, train
from tests.unit.training.conftest import write_samples


def changed(config: TrainingConfig, **updates: Any) -> TrainingConfig:
    """`config` with other values; a dict updates its section."""
    raw = config.model_dump()
    for name, value in updates.items():
        raw[name] = raw[name] | value if isinstance(value, dict) else value
    return TrainingConfig.model_validate(raw)


def losses(config: TrainingConfig) -> dict[int, float]:
    lines = (config.output / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines) if "loss" in line}


def test_run_leaves_a_checkpoint_and_a_curve(tiny_run: TrainingConfig) -> None:
    train(tiny_run)
    config, tensors = load_checkpoint(tiny_run.output / "checkpoint")
    assert config.target_layer_ids == (0, 1)
    ids = tensors[D2T_TENSOR] + torch.arange(64)
    assert 2 in ids  # the end of text is always in the draft vocabulary
    assert 0 not in ids  # the mask never
    assert sorted(losses(tiny_run)) == [1, 2, 3, 4, 5, 6]
    validated = [
        line for line in (tiny_run.output / "metrics.jsonl").read_text().splitlines() if "tau" in line
    ]
    report = json.loads(validated[-1])
    assert 1.0 <= report["tau_sampling"] <= 4.0
    assert 1.0 <= report["tau_greedy"] <= 4.0
    assert len(report["acceptance_sampling"]) == 3


def test_killed_run_resumes_to_the_same_curve(tiny_run: TrainingConfig, tmp_path: Path) -> None:
    train(tiny_run)
    interrupted = changed(tiny_run, output=tmp_path / "interrupted")
    target = TransformersTarget(tiny_run.target)
    run = Run(interrupted, target, stop=lambda: False)
    for _ in range(3):
        run.learner.train_step(run.learner.sample_batch(run.cache, run._training, run._lengths))
    run.save()
    run.learner.train_step(run.learner.sample_batch(run.cache, run._training, run._lengths))  # lost
    train(interrupted)
    assert losses(interrupted) == {step: loss for step, loss in losses(tiny_run).items() if step > 3}
    straight = torch.load(tiny_run.output / "state.pt")["network"]
    resumed = torch.load(interrupted.output / "state.pt")["network"]
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_learns_what_it_sees(tiny_run: TrainingConfig) -> None:
    run = Run(tiny_run, TransformersTarget(tiny_run.target), stop=lambda: False)
    learner = run.learner
    batch = learner.sample_batch(run.cache, run._training, run._lengths)
    first = learner.train_step(batch).total.item()
    for _ in range(40):
        last = learner.train_step(batch).total.item()
    assert last < 0.9 * first


@pytest.mark.parametrize(
    "architecture",
    [
        {"kind": "dspark", "markov_rank": 8, "markov_head_type": "rnn", "context_window": 16},
        {"kind": "dflash"},
        {"kind": "eagle3"},
        {"kind": "mtp", "target_layer_ids": [2]},
    ],
    ids=lambda architecture: architecture["kind"],
)
def test_every_kind_learns_and_leaves_its_checkpoint(
    tiny_run: TrainingConfig, architecture: dict[str, Any]
) -> None:
    shared = {"target_layer_ids": [0, 1], "draft_vocab_size": 64, "num_layers": 1, "init_layers": [2]}
    block = {"block_size": 3, "mask_token_id": 0}
    own = {**shared, **({} if architecture["kind"] == "mtp" else block), **architecture}
    raw = {**tiny_run.model_dump(), "architecture": own}
    config = TrainingConfig.model_validate(raw)
    run = Run(config, TransformersTarget(config.target), stop=lambda: False)
    learner = run.learner
    batch = learner.sample_batch(run.cache, run._training, run._lengths)
    first = learner.train_step(batch).total.item()
    for _ in range(25):
        last = learner.train_step(batch).total.item()
    assert last < 0.95 * first
    run.validate()
    run.save()
    assert load_checkpoint(config.output / "checkpoint")[0] == learner.network.config
    assert learner.network.config.kind == architecture["kind"]


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ({"kind": "eagle3", "num_layers": 2}, "num_layers must be 1"),
        ({"kind": "mtp", "target_layer_ids": [0, 1]}, "one tap and block_size 1"),
        ({"kind": "dflash", "mask_token_id": 0, "markov_rank": 4}, "neither a sequential nor"),
        ({"kind": "dspark"}, "mask_token_id is needed"),
    ],
)
def test_architectures_that_do_not_exist(architecture: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ArchitectureConfig.model_validate({"target_layer_ids": [1], **architecture})


def test_stop_request_saves(tiny_run: TrainingConfig) -> None:
    requested = False
    run = Run(tiny_run, TransformersTarget(tiny_run.target), stop=lambda: requested)
    run.learner.train_step(run.learner.sample_batch(run.cache, run._training, run._lengths))
    requested = True
    run.loop()
    assert torch.load(tiny_run.output / "state.pt")["step"] == 1


def test_sigterm_is_a_stop_request() -> None:
    with _StopSignal() as requested:
        assert not requested()
        signal.raise_signal(signal.SIGTERM)
        assert requested()


def test_growing_data_is_taken_in(tiny_run: TrainingConfig, tmp_path: Path) -> None:
    run = Run(tiny_run, TransformersTarget(tiny_run.target), stop=lambda: False)
    held_out = len(run.held_out)
    write_samples(tmp_path / "more.jsonl", 20, seed=5)
    run.refresh()
    assert len(run.cache) == 60
    assert len(run.held_out) == held_out + 2
    assert not {0, 10, 20, 30, 40, 50} & set(run._training)


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulated_batches_make_the_same_step(tiny_run: TrainingConfig, accumulate: int) -> None:
    weights, totals = [], []
    for parts in (1, accumulate):
        config = changed(tiny_run, sequences_per_step=4, accumulate=parts, bf16=False)
        run = Run(config, TransformersTarget(config.target), stop=lambda: False)
        batches = run.learner.sample_batch(run.cache, run._training, run._lengths)
        assert len(batches) == parts
        totals.append(run.learner.train_step(batches).total.item())
        weights.append([p.clone() for p in run.learner.network.parameters()])
    assert totals[1] == pytest.approx(totals[0], rel=1e-5)
    for whole, summed in zip(*weights, strict=True):
        torch.testing.assert_close(summed, whole, atol=2e-5, rtol=1e-3)


def test_too_few_sequences_to_share(tiny_run: TrainingConfig) -> None:
    with pytest.raises(
        ConfigError, match=r"sequences_per_step \(2\) must be at least processes × accumulate"
    ):
        train(changed(tiny_run, accumulate=3))


def test_observers_see_every_figure(tiny_run: TrainingConfig) -> None:
    seen: list[tuple[int, dict[str, Any]]] = []
    saved: list[int] = []

    class Notes(Observer):
        def figures(self, step: int, values: Mapping[str, Any]) -> None:
            seen.append((step, dict(values)))

        def saved(self, step: int) -> None:
            assert (tiny_run.output / "state.pt").exists()
            saved.append(step)

    train(tiny_run, [Notes()])
    assert saved == [6]
    assert [step for step, values in seen if "loss" in values] == [1, 2, 3, 4, 5, 6]
    assert any("acceptance_sampling" in values for _, values in seen)


def test_bad_lines_stop_a_run_that_asked_for_it(tiny_run: TrainingConfig, tmp_path: Path) -> None:
    with (tmp_path / "data.jsonl").open("ab") as file:
        file.write(b'{"prompt_ids": [3], "response_ids": []}\n')
    with pytest.raises(DataError, match=r"data\.jsonl:41: response_ids needs at least two tokens"):
        train(changed(tiny_run, bad_data="stop"))
    train(changed(tiny_run, bad_data="skip", cache={"folder": tmp_path / "other"}))


def test_nan_stops_before_the_weights_change(tiny_run: TrainingConfig) -> None:
    run = Run(tiny_run, TransformersTarget(tiny_run.target), stop=lambda: False)
    learner = run.learner
    before = learner.network.norm.weight.clone()
    with torch.no_grad():
        learner.network.fc.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteLossError, match=r"step 0: loss nan") as raised:
        learner.train_step(learner.sample_batch(run.cache, run._training, run._lengths))
    assert len(raised.value.numbers) == 2
    assert torch.equal(learner.network.norm.weight, before)


def poison(run: Run, number: int) -> str:
    """A sequence whose taps are not finite, as those of a target that overflows. Returns its line."""
    sequence = run.cache.sequence

    def poisoned(wanted: int) -> CachedSequence:
        found = sequence(wanted)
        return replace(found, taps=found.taps * float("nan")) if wanted == number else found

    run.cache.sequence = poisoned  # type: ignore[method-assign]
    return run.cache.origin(number)


@pytest.mark.parametrize("bad_data", ["skip", "stop"])
def test_a_loss_that_is_not_finite_names_its_lines(
    tiny_run: TrainingConfig, bad_data: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = changed(tiny_run, bad_data=bad_data, optimizer={"total_steps": 30})
    run = Run(config, TransformersTarget(config.target), stop=lambda: False)
    line = poison(run, 7)
    assert line.endswith("data.jsonl:8")
    if bad_data == "stop":
        with pytest.raises(NonFiniteLossError, match=r"data\.jsonl:8"):
            run.loop()
        return
    run.loop()
    skipped = [message for message in caplog.messages if "skipped step" in message]
    assert skipped
    assert all(line in message for message in skipped)
    assert sorted(losses(config)) == sorted(set(range(1, 31)) - {int(m.split()[2][:-1]) + 1 for m in skipped})
    assert all(torch.isfinite(weight).all() for weight in run.learner.network.parameters())


def test_a_training_that_has_diverged_stops(tiny_run: TrainingConfig) -> None:
    run = Run(tiny_run, TransformersTarget(tiny_run.target), stop=lambda: False)
    with torch.no_grad():
        run.learner.network.fc.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteLossError, match="step 2"):  # the third
        run.loop()


def test_a_target_that_is_not_finite_names_the_line(tiny_run: TrainingConfig, tmp_path: Path) -> None:
    target = TransformersTarget(tiny_run.target)
    hidden_states = target.hidden_states

    def overflow(tokens: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        taps, hidden = hidden_states(tokens, layers)
        return taps, hidden * float("nan") if len(tokens) == 21 + 3 else hidden

    target.hidden_states = overflow  # type: ignore[method-assign]
    run = Run(tiny_run, target, stop=lambda: False)
    assert len(run.cache) == 38  # two of the 40 samples are that long
    assert run.cache.origin(3).endswith("data.jsonl:5")
    stopping = changed(tiny_run, bad_data="stop", cache={"folder": tmp_path / "other"})
    with pytest.raises(
        DataError, match=r"data\.jsonl:4: the target's hidden states or probabilities are not"
    ):
        Run(stopping, target, stop=lambda: False)


def test_first_layer_starts_with_the_targets_context_keys(tiny_run: TrainingConfig) -> None:
    target = TransformersTarget(tiny_run.target, dtype=torch.float32)
    learner: Learner = Run(tiny_run, target, stop=lambda: False).learner
    tokens = torch.arange(3, 20)
    taps, _ = target.hidden_states(tokens, (0, 1))
    network = learner.network
    with torch.no_grad():
        # Random parts of fc aside, it passes the last tap: the input of target layer 2.
        network.fc.weight[:, : network.config.hidden_size] = 0.0
        (keys, _) = network.context_kv(network.context(taps)[None], torch.arange(len(tokens))[None])[0]
        cache = target._model(tokens[None], use_cache=True).past_key_values
    torch.testing.assert_close(keys[0], cache.layers[2].keys[0], atol=1e-4, rtol=1e-4)


def test_warm_start_with_another_vocabulary(tiny_run: TrainingConfig, tmp_path: Path) -> None:
    train(tiny_run)
    bigger = changed(
        tiny_run,
        output=tmp_path / "second",
        start_from=tiny_run.output / "checkpoint",
        architecture={"draft_vocab_size": 100},
    )
    run = Run(bigger, TransformersTarget(tiny_run.target), stop=lambda: False)
    _, old = load_checkpoint(tiny_run.output / "checkpoint")
    old_ids = old[D2T_TENSOR] + torch.arange(64)
    new_ids = run.learner.shared.draft_to_target
    head = run.learner.network.markov_head
    assert head is not None
    for target_id in (2, int(old_ids[10])):
        old_row = old["markov_head.markov_w2.weight"][int((old_ids == target_id).nonzero())]
        new_row = head.markov_w2.weight[int((new_ids == target_id).nonzero())]
        torch.testing.assert_close(new_row, old_row.float())
    assert torch.equal(run.learner.network.fc.weight, old["fc.weight"].float())


def test_the_confidence_head_alone(tiny_run: TrainingConfig, tmp_path: Path) -> None:
    train(tiny_run)
    checkpoint = tiny_run.output / "checkpoint"
    alone = changed(
        tiny_run,
        output=tmp_path / "alone",
        start_from=checkpoint,
        trainable="confidence",
        architecture={"draft_vocab_size": 64},
    )
    train(alone)
    _, before = load_checkpoint(checkpoint)
    _, after = load_checkpoint(alone.output / "checkpoint")
    changed_tensors = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed_tensors
    assert all("confidence" in name for name in changed_tensors)


def test_a_confidence_head_needs_its_drafter(tiny_run: TrainingConfig) -> None:
    with pytest.raises(ValueError, match="start_from"):
        changed(tiny_run, trainable="confidence")


def test_damaged_state_is_named(tiny_run: TrainingConfig) -> None:
    train(changed(tiny_run, optimizer={"total_steps": 1, "warmup_steps": 0}))
    (tiny_run.output / "state.pt").write_bytes(b"nothing")
    with pytest.raises(ArtefactError, match=r"state\.pt is damaged"):
        train(tiny_run)


def test_too_little_data(tiny_run: TrainingConfig) -> None:
    with pytest.raises(ConfigError, match="40 usable samples"):
        train(changed(tiny_run, validation_every=41))


def test_last_layer_cannot_be_tapped(tiny_run: TrainingConfig) -> None:
    with pytest.raises(ConfigError, match="must be below 2"):
        train(changed(tiny_run, architecture={"target_layer_ids": (0, 2)}))


def test_learning_rate() -> None:
    config = OptimizerConfig(learning_rate=1.0, final_fraction=0.1, warmup_steps=4, total_steps=104)
    assert [learning_rate(step, config) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate(54, config) == pytest.approx(0.55)
    assert learning_rate(104, config) == pytest.approx(0.1)


def test_shipped_configs_load() -> None:
    paths = sorted(set(Path("configs/training").glob("*.yaml")) - {Path("configs/training/openings.yaml")})
    assert paths
    for path in paths:
        load_training_config(path)


def test_wrong_keys_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("target: x\nspeed: 3\n")
    with pytest.raises(ConfigError, match="speed"):
        load_training_config(path)
    with pytest.raises(ConfigError, match="cannot read"):
        load_training_config(tmp_path / "absent.yaml")
