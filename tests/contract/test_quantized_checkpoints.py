"""Targets in 8 bits: checkpoints of compressed-tensors, and matrices kept in 8 bits."""

import json
from pathlib import Path

import pytest
import torch
from dspark_kernels.linear import Fp8Linear, Int8Linear, quantize_fp8, quantize_int8
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark_ray.core.errors import CheckpointError, ConfigError
from dspark_ray.engine.scoring import teacher_forced_logits
from dspark_ray.models.quantized import check_supported, open_weights
from dspark_ray.models.targets.decoder import load_target
from dspark_ray.models.weights import Part
from tests.far_device import far_device
from tests.tiny import tiny_model_dir

TOKENS = [3, 17, 99, 4, 60, 2, 2, 31]


def settings(kind: str, strategy: str, **weights: object) -> dict:
    group = {"weights": {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True} | weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def quantise(weight: Tensor, kind: str, strategy: str) -> tuple[Tensor, Tensor]:
    """(8-bit values [out, in], scale as stored)"""
    to_bits = quantize_fp8 if kind == "float" else quantize_int8
    if strategy == "group":
        groups = weight.view(weight.shape[0], -1, 16)
        values, scale = to_bits(groups.flatten(0, 1))
        return values.view(weight.shape), scale.view(weight.shape[0], -1)
    if strategy == "tensor":
        largest = weight.abs().max().expand(weight.shape[0])
        values, scale = to_bits(weight, largest)
        return values, scale[:1]
    values, scale = to_bits(weight)
    return values, scale.unsqueeze(1)


def packed(values: Tensor) -> Tensor:
    words = (values.int() + 128).view(values.shape[0], -1, 4)
    return sum(words[..., i] << 8 * i for i in range(4)).int()


def torchao_settings(name: str) -> dict:
    default = {"_type": name, "_version": 2, "_data": {"set_inductor_config": True}}
    return {"quant_method": "torchao", "quant_type": {"default": default}}


def quantised_pair(
    tmp_path: Path, kind: str, strategy: str, *, packs: bool = False, torchao: str | None = None
) -> tuple[Path, Path]:
    """A tiny model in 8 bits, and the same values in fp32."""
    model = tiny_model_dir(tmp_path, "qwen3")
    plain = load_file(model / "model.safetensors")
    stored, meant = dict(plain), dict(plain)
    for name, weight in plain.items():
        if not name.endswith("_proj.weight"):
            continue
        module = name.removesuffix(".weight")
        values, scale = quantise(weight.float(), kind, strategy)
        whole = (
            scale if scale.dim() < 2 else scale.repeat_interleave(weight.shape[1] // scale.shape[1], dim=1)
        )
        meant[name] = values.float() * whole
        del stored[name]
        if torchao is not None:
            stored |= {f"{module}._weight_qdata": values, f"{module}._weight_scale": scale.contiguous()}
            if kind == "int":
                stored[f"{module}._weight_zero_point"] = torch.zeros(scale.shape, dtype=torch.int8)
            continue
        stored[f"{module}.weight_scale"] = scale.contiguous()
        if packs:
            stored[f"{module}.weight_packed"] = packed(values)
            stored[f"{module}.weight_shape"] = torch.tensor(weight.shape)
        else:
            stored[f"{module}.weight"] = values
            stored[f"{module}.input_scale"] = torch.ones(1)  # made for 8-bit activations
    pair = (tmp_path / "eight", tmp_path / "plain")
    raw = json.loads((model / "config.json").read_text(encoding="utf-8"))
    for path, tensors in zip(pair, (stored, meant), strict=True):
        path.mkdir()
        save_file(tensors, path / "model.safetensors")
        said = settings(kind, strategy) if torchao is None else torchao_settings(torchao)
        extra = {"quantization_config": said} if path.name == "eight" else {}
        (path / "config.json").write_text(json.dumps(raw | extra), encoding="utf-8")
    return pair


@pytest.mark.parametrize(
    ("kind", "strategy", "packs"),
    [
        ("float", "channel", False),
        ("float", "tensor", False),
        ("int", "channel", False),
        ("int", "channel", True),
        ("int", "group", True),
    ],
)
def test_logits_are_those_of_the_dequantised_model(tmp_path, kind, strategy, packs):
    eight, plain = quantised_pair(tmp_path, kind, strategy, packs=packs)
    found, expected = (
        teacher_forced_logits(load_target(path, torch.float32, 64), TOKENS, 0) for path in (eight, plain)
    )
    assert torch.equal(found, expected)
    other = teacher_forced_logits(load_target(tmp_path / "tiny-qwen3", torch.float32, 64), TOKENS, 0)
    assert not torch.equal(found, other)


@pytest.mark.parametrize(
    ("kind", "strategy", "name"),
    [
        ("int", "channel", "Int8WeightOnlyConfig"),
        ("int", "group", "Int8WeightOnlyConfig"),
        ("float", "channel", "Float8WeightOnlyConfig"),
        ("float", "tensor", "Float8DynamicActivationFloat8WeightConfig"),
    ],
)
def test_logits_of_torchao_are_those_of_the_dequantised_model(tmp_path, kind, strategy, name):
    eight, plain = quantised_pair(tmp_path, kind, strategy, torchao=name)
    found, expected = (
        teacher_forced_logits(load_target(path, torch.float32, 64), TOKENS, 0) for path in (eight, plain)
    )
    assert torch.equal(found, expected)
    part = Part(1, 8, 33)
    whole = open_weights(plain).take("model.layers.1.mlp.down_proj.weight", (64, 96))
    found = open_weights(eight).take("model.layers.1.mlp.down_proj.weight", (64, 96), part)
    assert torch.equal(found, whole[:, 8:33])


def test_what_torchao_stores_otherwise_is_refused(tmp_path):
    for kinds in ({"default": {"_type": "Int4WeightOnlyConfig"}}, "int4_weight_only", None):
        with pytest.raises(ConfigError, match="of torchao is not read by the native engine"):
            check_supported({"quant_method": "torchao", "quant_type": kinds})
    eight, _ = quantised_pair(tmp_path, "int", "channel", torchao="Int8WeightOnlyConfig")
    for field, value, message in (
        ("zero_point", torch.ones(64, 1), "symmetric"),
        ("tensor_scale", torch.ones(1), "reads no 'tensor_scale'"),
    ):
        stored = load_file(eight / "model.safetensors")
        stored[f"model.layers.1.self_attn.q_proj._weight_{field}"] = value
        changed = tmp_path / field
        changed.mkdir()
        save_file(stored, changed / "model.safetensors")
        (changed / "config.json").write_bytes((eight / "config.json").read_bytes())
        with pytest.raises(CheckpointError, match=message):
            load_target(changed, torch.float32, 64)


@pytest.mark.parametrize(("kind", "packs"), [("float", False), ("int", True)])
def test_parts_are_read_as_parts_of_the_whole(tmp_path, kind, packs):
    eight, plain = quantised_pair(tmp_path, kind, "channel", packs=packs)
    for module, shape in (("self_attn.q_proj", (64, 64)), ("mlp.down_proj", (64, 96))):
        name = f"model.layers.1.{module}.weight"
        whole = open_weights(plain).take(name, shape)
        for part in (Part(0, 16, 48), Part(1, 8, 33)):
            source = open_weights(eight)
            expected = whole.narrow(part.dim, part.start, part.stop - part.start)
            assert torch.equal(source.take(name, shape, part), expected)
            assert torch.equal(source.whole(name), whole)


def test_what_is_not_read_is_refused(tmp_path):
    for wrong in (
        {"quant_method": "gptq", "bits": 4},
        settings("int", "channel", num_bits=4),
        settings("int", "channel", symmetric=False),
        settings("float", "block"),
    ):
        with pytest.raises(ConfigError, match="native engine"):
            check_supported(wrong)
    eight, _ = quantised_pair(tmp_path, "float", "channel")
    tensors = load_file(eight / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match="the config asks for"):
        open_weights(eight).take(name, (5, 64))
    save_file(
        tensors | {"model.layers.0.mlp.up_proj.weight_scale": torch.ones(7, 1)}, eight / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match="weight_scale has shape"):
        load_target(eight, torch.float32, 64)
    save_file(tensors | {name: tensors[name].bfloat16()}, eight / "model.safetensors")
    with pytest.raises(CheckpointError, match="bfloat16 beside a weight_scale"):
        load_target(eight, torch.float32, 64)
    del tensors[name]
    save_file(tensors, eight / "model.safetensors")
    with pytest.raises(CheckpointError, match="neither weight nor"):
        load_target(eight, torch.float32, 64)


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_a_target_kept_in_8_bits_is_close_and_its_checkpoint_stays_what_it_was(tmp_path, quantization):
    kind = "int" if quantization == "int8" else "float"
    eight, plain = quantised_pair(tmp_path, kind, "channel")
    kept = load_target(eight, torch.float32, 64, quantization)
    expected = teacher_forced_logits(load_target(plain, torch.float32, 64), TOKENS, 0)
    # Quantised again by the same rule, the values come out the same: only the LM head is new.
    kept.head = load_target(plain, torch.float32, 64).head
    torch.testing.assert_close(teacher_forced_logits(kept, TOKENS, 0), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("linear", [Int8Linear, Fp8Linear])
def test_elsewhere_than_on_a_cpu_the_weight_stays_in_8_bits(linear):
    weight, bias, x = torch.randn(33, 64), torch.randn(33), torch.randn(5, 64)
    near = linear(weight, bias)(x)
    with far_device() as device:
        kept = linear(weight.to(device), bias.to(device))
        torch.testing.assert_close(kept(x.to(device)).cpu(), near, rtol=1e-4, atol=1e-4)
    assert (near - torch.nn.functional.linear(x, weight, bias)).abs().max() < 2.0
    bits = [t for t in kept._multiply.__closure__ if isinstance(t.cell_contents, Tensor)]
    assert any(cell.cell_contents.element_size() == 1 for cell in bits)


def test_fp8_rounds_to_the_nearest():
    weight = torch.randn(9, 200)
    values, scales = quantize_fp8(weight)
    assert values.float().abs().amax(1).tolist() == [448.0] * 9
    error = (values.float() * scales.unsqueeze(1) - weight).abs()
    assert (error <= weight.abs() * 2**-4 + scales.unsqueeze(1) * 2**-9).all()  # 3 bits of fraction
