"""Whether an engine fits into a GPU: what is counted, and what is said when it does not."""

import json
from pathlib import Path

import pytest
import torch

from dspark_ray.core.config import AppConfig, parse_app_config
from dspark_ray.core.errors import ConfigError
from dspark_ray.engine import build
from dspark_ray.engine.build import build_engine
from dspark_ray.engine.device_memory import GIB, DeviceNeeds, check_fits, device_needs
from tests.tiny import tiny_model_dir
from tests.tiny_engine import tiny_drafter_dir

QWEN3_8B = Path(__file__).parents[2] / "configs/models/Qwen/Qwen3-8B.json"


def config(**sections: dict) -> AppConfig:
    return parse_app_config({"speculation": {"mode": "off"}} | sections)


def test_an_8b_model_is_counted_as_it_is(tmp_path):
    (tmp_path / "config.json").write_bytes(QWEN3_8B.read_bytes())
    plain = device_needs(config(), tmp_path)
    assert plain.weights == pytest.approx(8.19e9 * 2, rel=0.01)  # 8.19 B parameters in bf16
    assert plain.kv_per_block == 16 * 36 * 2 * 8 * 128 * 2
    embedding = 151936 * 4096 * 2
    eight = device_needs(config(model={"quantization": "fp8"}), tmp_path)
    assert eight.weights == pytest.approx(embedding + (plain.weights - embedding) / 2)
    assert device_needs(config(engine={"cuda_graphs": False}), tmp_path).graphs == 0
    assert 0 < plain.graphs < 2 * GIB


def test_a_tiny_models_tensors_are_all_counted(tmp_path):
    model = tiny_model_dir(tmp_path, "qwen3")
    checkpoint = tiny_drafter_dir(tmp_path / "drafter", 128, draft_vocab=None)
    speculation = {
        "mode": "fixed",
        "num_draft_tokens": 4,
        "drafter": {"kind": "dspark", "path": str(checkpoint)},
    }
    needs = device_needs(config(model={"dtype": "float32"}, speculation=speculation), model)
    stored = (model / "model.safetensors").stat().st_size
    assert needs.weights == pytest.approx(stored, rel=0.1)  # norms and the header are left out
    assert needs.drafter == pytest.approx(2 * (checkpoint / "model.safetensors").stat().st_size)
    target_kv, drafter_kv = 3 * 2 * 2 * 16 * 4, 2 * 2 * 1 * 16 * 4  # layers · (K, V) · heads · dim · fp32
    assert needs.kv_per_block == 16 * (target_kv + drafter_kv)


def test_ranks_share_weights_and_kv_and_the_first_has_more(tmp_path):
    (tmp_path / "config.json").write_bytes(QWEN3_8B.read_bytes())
    plain = device_needs(config(), tmp_path)
    four = {"tensor_parallel_size": 4}
    first, second = (device_needs(config(engine=four), tmp_path, rank) for rank in (0, 1))
    assert first.weights == second.weights == plain.weights / 4
    assert first.kv_per_block == second.kv_per_block == plain.kv_per_block / 4
    assert first.graphs == second.graphs == 0  # their passes are not captured
    assert second.step < first.step <= plain.step  # all logits are rank 0's
    sixteen = device_needs(config(engine={"tensor_parallel_size": 16}), tmp_path, 1)
    assert sixteen.kv_per_block == plain.kv_per_block / 8  # of 8 KV heads, each lies on two ranks
    checkpoint = tiny_drafter_dir(tmp_path / "drafter", 128, draft_vocab=None)
    drafter = {"mode": "fixed", "num_draft_tokens": 4, "drafter": {"kind": "dspark", "path": str(checkpoint)}}
    first, second = (
        device_needs(config(engine=four, speculation=drafter), tmp_path, rank) for rank in (0, 1)
    )
    assert first.drafter > 2 * 151936 * 4096 * 2  # with the whole embedding and head that it reads
    assert second.drafter == 0


def test_the_message_says_what_would_fit():
    needs = DeviceNeeds(weights=10.0 * GIB, drafter=GIB, step=GIB, graphs=GIB, kv_per_block=GIB / 100)
    wanted = config(engine={"kv_num_blocks": 1000, "kv_block_size": 16}, model={"max_model_len": 2048})
    check_fits(needs, wanted, 23.1 * GIB)
    with pytest.raises(
        ConfigError, match=r"needs 23.00 GiB .*KV 10.00.* engine.kv_num_blocks to at most 70[01] "
    ):
        check_fits(needs, wanted, 20.005 * GIB)
    with pytest.raises(ConfigError, match="max_model_len to at most 800"):
        check_fits(needs, wanted, 13.505 * GIB)
    with pytest.raises(ConfigError, match=r"without any KV 13.00 GiB.*quantization to fp8"):
        check_fits(needs, wanted, 12.0 * GIB)


def test_it_is_asked_before_anything_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(json.loads(QWEN3_8B.read_text(encoding="utf-8"))))
    monkeypatch.setattr(build, "choose_device", lambda wanted: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 2 * GIB))
    with pytest.raises(ConfigError, match=r"1.00 GiB are free"):
        build_engine(config(), model_dir=tmp_path)  # which holds no weights
