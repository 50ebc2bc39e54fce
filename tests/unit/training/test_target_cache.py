"""The cache holds what the target says, grows in place, and refuses what it was not made for."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dspark_ray.core.errors import ArtefactError
from dspark_ray.training.cache import SHARD_SAMPLES, TargetCache, top_probabilities
from dspark_ray.training.target import TransformersTarget
from tests.tiny import tiny_model_dir
from tests.unit.training.conftest import TOP_K, VOCAB_SIZE, write_samples

SPEC: dict[str, object] = {"target": "tiny", "top_k": TOP_K}
LAYERS = (0, 1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TransformersTarget:
    return TransformersTarget(tiny_model_dir(tmp_path_factory.mktemp("model")), dtype=torch.float32)


def extend(cache: TargetCache, path: Path, target: TransformersTarget, max_bytes: int = 10**9) -> int:
    return cache.extend([path], target, layer_ids=LAYERS, top_k=TOP_K, max_length=64, max_bytes=max_bytes)


def test_sequence_holds_taps_and_probabilities(tmp_path: Path, target: TransformersTarget) -> None:
    write_samples(tmp_path / "data.jsonl", 3)
    cache = TargetCache(tmp_path / "cache", SPEC)
    assert extend(cache, tmp_path / "data.jsonl", target) == 3
    sequence = cache.sequence(1)
    assert sequence.prompt_length == 9
    assert sequence.temperature == 1.0
    assert len(sequence.tokens) == cache.length(1) == 22
    model = target._model
    with torch.no_grad():
        out = model(sequence.tokens[None], output_hidden_states=True)
    expected = torch.cat([out.hidden_states[1][0], out.hidden_states[2][0]], dim=-1)
    torch.testing.assert_close(sequence.taps.float(), expected, atol=0.02, rtol=0.02)
    # Row j is the distribution of response position j, made at the position before it.
    probs = out.logits[0].softmax(-1)[8:21]
    torch.testing.assert_close(sequence.top_probs, probs.gather(1, sequence.top_ids), atol=1e-3, rtol=2e-3)
    torch.testing.assert_close(sequence.top_probs, probs.topk(TOP_K).values, atol=1e-3, rtol=2e-3)


def test_progress_is_of_the_new_bytes(tmp_path: Path, target: TransformersTarget) -> None:
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    write_samples(first, SHARD_SAMPLES + 2)
    cache = TargetCache(tmp_path / "cache", SPEC)
    extend(cache, first, target)
    write_samples(first, 3, seed=1)
    write_samples(second, 3, seed=2)
    shares: list[float] = []
    settings = {"layer_ids": LAYERS, "top_k": TOP_K, "max_length": 64, "max_bytes": 10**9}
    cache.extend([first, second], target, **settings, on_progress=shares.append)
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    assert len(shares) == 3 + 1 + 3 + 1


def test_growth_and_reopening(tmp_path: Path, target: TransformersTarget) -> None:
    data = tmp_path / "data.jsonl"
    write_samples(data, 3)
    cache = TargetCache(tmp_path / "cache", SPEC)
    extend(cache, data, target)
    assert extend(cache, data, target) == 0
    write_samples(data, 2, seed=1)
    assert extend(cache, data, target) == 2
    again = TargetCache(tmp_path / "cache", SPEC)
    again.verify()
    assert len(again) == 5
    assert torch.equal(again.sequence(4).taps, cache.sequence(4).taps)
    assert again.num_bytes == cache.num_bytes


def test_size_limit(tmp_path: Path, target: TransformersTarget) -> None:
    write_samples(tmp_path / "data.jsonl", 3)
    cache = TargetCache(tmp_path / "cache", SPEC)
    assert extend(cache, tmp_path / "data.jsonl", target, max_bytes=0) == 0


def test_other_target_is_refused(tmp_path: Path, target: TransformersTarget) -> None:
    write_samples(tmp_path / "data.jsonl", 3)
    extend(TargetCache(tmp_path / "cache", SPEC), tmp_path / "data.jsonl", target)
    with pytest.raises(ArtefactError, match="another target"):
        TargetCache(tmp_path / "cache", SPEC | {"target": "other"})


def test_damage_is_found(tmp_path: Path, target: TransformersTarget) -> None:
    write_samples(tmp_path / "data.jsonl", 3)
    cache = TargetCache(tmp_path / "cache", SPEC)
    extend(cache, tmp_path / "data.jsonl", target)
    damaged = tmp_path / "cache" / "00000.taps.npy"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(ArtefactError, match=r"00000\.taps\.npy is damaged"):
        TargetCache(tmp_path / "cache", SPEC).verify()


def test_top_probabilities_are_exact() -> None:
    logits = torch.randn(7, 512)
    probs, ids = top_probabilities(logits, 5, chunk=16)
    expected = logits.softmax(-1).topk(5)
    torch.testing.assert_close(probs, expected.values)
    assert torch.equal(ids, expected.indices)


def test_expected_counts(tmp_path: Path, target: TransformersTarget) -> None:
    write_samples(tmp_path / "data.jsonl", 3)
    cache = TargetCache(tmp_path / "cache", SPEC)
    extend(cache, tmp_path / "data.jsonl", target)
    counts = cache.expected_counts(VOCAB_SIZE)
    expected = np.zeros(VOCAB_SIZE)
    for number in range(3):
        sequence = cache.sequence(number)
        np.add.at(expected, sequence.top_ids.numpy().ravel(), sequence.top_probs.numpy().ravel())
    np.testing.assert_allclose(counts, expected, rtol=1e-6)
