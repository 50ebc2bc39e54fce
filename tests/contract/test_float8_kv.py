"""A KV cache in float8: what is stored, what the scales of a checkpoint do, and what is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_ray.core.config import parse_app_config
from dspark_ray.core.errors import CheckpointError, ConfigError
from dspark_ray.engine.build import check_kv_dtype
from dspark_ray.engine.device_memory import device_needs
from dspark_ray.engine.scoring import teacher_forced_logits
from dspark_ray.models.kv import FLOAT8
from dspark_ray.models.targets.decoder import load_target
from dspark_ray.profiling.identity import table_identity
from dspark_ray.runtime.ranks import TargetSpec
from tests.tiny import tiny_model_dir
from tests.tiny_engine import request, run, tiny_drafter_dir, tiny_engine
from tests.tiny_ranks import led

TOKENS = [3, 17, 99, 4, 60, 2, 2, 31]
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
}


def scaled(model_dir: Path, **scales: torch.Tensor) -> Path:
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    for layer in range(3):
        tensors |= {f"model.layers.{layer}.self_attn.{name}": scale.clone() for name, scale in scales.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return model_dir


def logits(model_dir: Path, kv_dtype: torch.dtype | None) -> torch.Tensor:
    target = load_target(model_dir, torch.float32, 64, kv_dtype=kv_dtype)
    return teacher_forced_logits(target, TOKENS, 0)


def test_logits_are_near_those_of_the_whole_cache_and_nearer_with_scales_that_fit(tmp_path: Path) -> None:
    model_dir = tiny_model_dir(tmp_path, "llama")
    expected = logits(model_dir, None)

    def error(found: torch.Tensor) -> float:
        return float((found - expected).abs().mean() / expected.abs().mean())

    plain = error(logits(model_dir, FLOAT8))
    assert 0.001 < plain < 0.1
    # A scale of two is a power of two: numbers in the middle of the range round as before.
    scaled(model_dir, k_scale=torch.tensor([2.0]), v_scale=torch.tensor(2.0))
    assert error(logits(model_dir, FLOAT8)) == pytest.approx(plain, rel=0.3)
    assert torch.equal(logits(model_dir, None), expected)  # without float8 they mean nothing
    # So large that next to nothing of a key or value is left.
    scaled(model_dir, k_scale=torch.tensor([5000.0]), v_scale=torch.tensor(5000.0))
    assert error(logits(model_dir, FLOAT8)) > 5 * plain


def test_engine_and_ranks_write_the_same_with_drafts_and_without(tmp_path: Path) -> None:
    spec = TargetSpec(
        scaled(tiny_model_dir(tmp_path, **SHAPE), k_scale=torch.tensor([0.5])),
        torch.float32,
        128,
        "none",
        FLOAT8,
    )
    items = [request(f"r{i}", [3 + i, 5, 8, 13, 3 + i, 5], temperature=0.0, max_tokens=16) for i in range(4)]
    target = load_target(spec.model_dir, spec.dtype, 128, kv_dtype=FLOAT8)
    engine = tiny_engine(None, target=target, speculation={"mode": "off"})
    assert engine.kv.k.dtype == FLOAT8
    assert engine.kv.num_bytes == engine.kv.k.numel() * 2
    assert not target.is_batch_invariant
    expected = run(engine, items)
    checkpoint = tiny_drafter_dir(tmp_path / "drafter", 61, draft_vocab=None)
    with led(spec, ["a", "a"]) as ranks:
        drafting = tiny_engine(checkpoint, target=ranks.target, speculation={"mode": "fixed"})
        assert run(drafting, items) == expected
        assert drafting.counters.drafted_tokens > 0
        assert ranks.followers[0]._decoder.kv_dtype == FLOAT8


@pytest.mark.parametrize("scale", [torch.tensor([1.0, 2.0]), torch.tensor(0.0), torch.tensor(float("nan"))])
def test_scales_that_are_none_are_refused(tmp_path: Path, scale: torch.Tensor) -> None:
    model_dir = scaled(tiny_model_dir(tmp_path), v_scale=scale)
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.v_scale"):
        load_target(model_dir, torch.float32, 64, kv_dtype=FLOAT8)


def test_it_is_counted_and_has_step_tables_of_its_own(tmp_path: Path) -> None:
    model_dir = tiny_model_dir(tmp_path)
    off = {"speculation": {"mode": "off"}}
    plain, eight = (parse_app_config(off | {"engine": {"kv_dtype": kind}}) for kind in ("auto", "fp8"))
    halves = [device_needs(config, model_dir).kv_per_block for config in (plain, eight)]
    assert halves[0] == 2 * halves[1]
    assert table_identity(plain, model_dir) != table_identity(eight, model_dir)


def test_what_cannot_be_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    config = parse_app_config({"engine": {"kv_dtype": "fp8"}})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"capability 8\.9 or later, and this one has 8\.0"):
        check_kv_dtype(config, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_kv_dtype(config, torch.device("cuda"))
    check_kv_dtype(config, torch.device("cpu"))
    assert "several times slower" in caplog.text
    for wrong, message in (
        ({"engine": {"kv_dtype": "bf16"}, "model": {"dtype": "float32"}}, "goes with model.dtype bfloat16"),
        ({"engine": {"kv_dtype": "fp8", "kind": "vllm"}}, "engine_args.kv_cache_dtype"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_app_config(wrong)
