"""Strict loading: what is missing, misshapen, left over, pickled or damaged is named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dspark_ray.core.errors import CheckpointError
from dspark_ray.models.weights import INDEX_FILE, SINGLE_FILE, WeightSource, load_safetensors


def _save_shards(model_dir: Path) -> None:
    save_file({"a": torch.ones(2)}, model_dir / "model-1.safetensors")
    save_file({"b": torch.zeros(3)}, model_dir / "model-2.safetensors")


def _save_index(model_dir: Path, weight_map: dict[str, str]) -> None:
    (model_dir / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def test_single_file(tmp_path: Path) -> None:
    save_file({"a": torch.arange(4.0)}, tmp_path / SINGLE_FILE)
    assert torch.equal(load_safetensors(tmp_path)["a"], torch.arange(4.0))


def test_shards_are_joined(tmp_path: Path) -> None:
    _save_shards(tmp_path)
    _save_index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    assert sorted(load_safetensors(tmp_path)) == ["a", "b"]


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    save_file({"a": torch.ones(2), "b": torch.ones(1)}, tmp_path / "model-2.safetensors")
    _save_index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    with pytest.raises(CheckpointError, match="two shards: a"):
        load_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "model-1.safetensors", "c": "model-2.safetensors"}, "no shard holds: c"),
        ({"a": "../model-1.safetensors"}, "outside its directory"),
        ({"a": "absent.safetensors"}, "cannot read"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, weight_map: dict[str, str], message: str) -> None:
    _save_shards(tmp_path)
    _save_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=message):
        load_safetensors(tmp_path)


def test_shards_without_an_index_are_ambiguous(tmp_path: Path) -> None:
    _save_shards(tmp_path)
    with pytest.raises(CheckpointError, match="2 safetensors files"):
        load_safetensors(tmp_path)


def test_pickles_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled"):
        load_safetensors(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no safetensors"):
        load_safetensors(tmp_path)
    with pytest.raises(CheckpointError, match="not a directory"):
        load_safetensors(tmp_path / "absent")


def test_damaged_file_and_index(tmp_path: Path) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00 not safetensors")
    with pytest.raises(CheckpointError, match="cannot read"):
        load_safetensors(tmp_path)
    (tmp_path / SINGLE_FILE).unlink()
    (tmp_path / INDEX_FILE).write_text("[]", encoding="utf-8")
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        load_safetensors(tmp_path)


def test_floats_are_cast_and_integers_are_not() -> None:
    source = WeightSource({"w": torch.ones(2), "d2t": torch.arange(3)}, dtype=torch.bfloat16)
    assert source.take("w", (2,)).dtype == torch.bfloat16
    assert source.take("d2t", (3,)).dtype == torch.int64
    source.finish()


def test_no_cast_shares_memory() -> None:
    stored = torch.ones(2)
    assert WeightSource({"w": stored}).take("w", (2,)) is stored


def test_missing_and_misshapen_tensors_are_named() -> None:
    source = WeightSource({"w": torch.ones(2, 3)})
    with pytest.raises(CheckpointError, match=r"'v' \[2\] is missing"):
        source.take("v", (2,))
    with pytest.raises(CheckpointError, match=r"'w' has shape \[2, 3\]"):
        source.take("w", (3, 2))


def test_optional_tensors() -> None:
    source = WeightSource({"bias": torch.ones(2)})
    assert "bias" in source
    assert source.take_optional("bias", (2,)) is not None
    assert source.take_optional("absent", (2,)) is None


def test_leftovers_fail_unless_ignorable() -> None:
    tensors = {
        name: torch.ones(1)
        for name in ("w", "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq", "extra.bias")
    }
    source = WeightSource(tensors)
    source.take("w", (1,))
    with pytest.raises(CheckpointError, match=r"^1 tensors have no place in the model: extra\.bias$"):
        source.finish(ignorable=["lm_head.weight"])
    source.take("extra.bias", (1,))
    source.finish(ignorable=["lm_head.weight"])


def test_long_lists_are_cut() -> None:
    source = WeightSource({f"w{i:02}": torch.ones(1) for i in range(20)})
    with pytest.raises(CheckpointError, match="w07 and 12 more"):
        source.finish()
