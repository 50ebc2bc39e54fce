"""LoRA adapters of the tiny engines' target, on disk in PEFT's layout.

ref = write_adapter(tmp_path / "sql", "attention")
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dspark_ray.core.types import AdapterRef
from dspark_ray.models.targets.lora_checkpoint import adapter_ref
from tests import tiny_engine as tiny

MODULES = {
    "self_attn.q_proj": (tiny.HEADS * tiny.HEAD_DIM, tiny.HIDDEN),
    "self_attn.k_proj": (tiny.KV_HEADS * tiny.HEAD_DIM, tiny.HIDDEN),
    "self_attn.v_proj": (tiny.KV_HEADS * tiny.HEAD_DIM, tiny.HIDDEN),
    "self_attn.o_proj": (tiny.HIDDEN, tiny.HEADS * tiny.HEAD_DIM),
    "mlp.gate_proj": (tiny.INNER, tiny.HIDDEN),
    "mlp.up_proj": (tiny.INNER, tiny.HIDDEN),
    "mlp.down_proj": (tiny.HIDDEN, tiny.INNER),
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"modules": list(MODULES), "r": 4, "lora_alpha": 8},
    "attention": {"modules": ["self_attn.q_proj", "self_attn.v_proj"], "r": 3, "lora_alpha": 6},
    "rslora": {"modules": ["self_attn.k_proj", "mlp.down_proj"], "r": 9, "lora_alpha": 6, "use_rslora": True},
    "last layer": {"modules": ["self_attn.o_proj", "mlp.up_proj"], "r": 2, "lora_alpha": 4, "layers": [2]},
}
"""Ranks odd and even, parts of fused matrices, and a layer alone."""


def adapter_tensors(name: str, modules: dict[str, tuple[int, int]] | None = None) -> dict[str, Tensor]:
    """PEFT's names → A and B, neither of them zero. modules: (outputs, inputs) of another target"""
    spec = ADAPTERS[name]
    generator = torch.Generator().manual_seed(list(ADAPTERS).index(name))
    tensors = {}
    for layer in spec.get("layers", range(tiny.LAYERS)):
        for module in spec["modules"]:
            out, size = (modules or MODULES)[module]
            key = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(spec["r"], size, generator=generator) * 0.2
            tensors[f"{key}.lora_B.weight"] = torch.randn(out, spec["r"], generator=generator) * 0.2
    return tensors


def write_adapter(
    path: Path, name: str, tensors: dict[str, Tensor] | None = None, **config: Any
) -> AdapterRef:
    path.mkdir(parents=True, exist_ok=True)
    spec = {key: value for key, value in ADAPTERS[name].items() if key not in ("modules", "layers")}
    settings = {"peft_type": "LORA", "bias": "none", "lora_dropout": 0.1, "modules_to_save": None}
    (path / "adapter_config.json").write_text(json.dumps({**settings, **spec, **config}))
    save_file(adapter_tensors(name) if tensors is None else tensors, path / "adapter_model.safetensors")
    return adapter_ref(name, path)


def merged_deltas(name: str, tensors: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """What the adapter adds to each of the model's tensors, by the definition."""
    spec, tensors = ADAPTERS[name], tensors or adapter_tensors(name)
    scaling = spec["lora_alpha"] / (spec["r"] ** 0.5 if spec.get("use_rslora") else spec["r"])
    return {
        a_name.removeprefix("base_model.model.").replace("lora_A.", ""): scaling
        * (tensors[a_name.replace("lora_A", "lora_B")] @ a)
        for a_name, a in tensors.items()
        if "lora_A" in a_name
    }
