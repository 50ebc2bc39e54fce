"""Whether an engine fits into its GPU, asked before anything is loaded. Arithmetic but for one question."""

import json
from dataclasses import dataclass
from pathlib import Path

from dspark_ray.core.config import AppConfig
from dspark_ray.core.errors import ConfigError
from dspark_ray.core.types import VerificationMode
from dspark_ray.models.graphs import capture_sizes
from dspark_ray.models.shapes import read_shape
from dspark_ray.models.weights import safetensors_files

GIB = 2**30
_RUNTIME_BYTES = 1.5 * GIB  # context, libraries' workspaces, compiled kernels
_DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class DeviceNeeds:
    """Bytes of an engine on its device."""

    weights: float
    drafter: float
    step: float  # activations, logits and distributions of the largest step, and the runtime
    graphs: float
    kv_per_block: float  # target and drafter

    @property
    def fixed(self) -> float:
        return self.weights + self.drafter + self.step + self.graphs


def device_needs(config: AppConfig, model_dir: Path, rank: int = 0) -> DeviceNeeds:
    """Of one rank of the native engine, by its configuration and the sizes of files. Loading itself needs no
    more: matrices are made one by one. Rank 0 has the drafter, with the target's whole embedding and head
    for it, and all logits."""
    size = _DTYPE_BYTES[config.model.dtype]
    raw = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    target = read_shape(raw, size)
    weights = target.weight_bytes
    if config.model.quantization != "none":  # all matrices but the embedding, and of a tied one a copy
        embedding = target.vocab_size * target.hidden_size * size
        weights = embedding + (weights - embedding * (1 if raw.get("tie_word_embeddings") else 2)) / size
        weights += embedding / size
    speculation, engine = config.speculation, config.engine
    ranks, is_first = engine.tensor_parallel_size, rank == 0
    weights /= ranks
    speculates = speculation.mode is not VerificationMode.OFF and speculation.drafter.kind != "none"
    gamma = speculation.num_draft_tokens if speculates else 0
    drafter, drafter_kv, taps = 0.0, 0.0, 0
    if speculates and is_first and speculation.drafter.path is not None:
        folder = Path(speculation.drafter.path)
        drafter = float(sum(path.stat().st_size for path in safetensors_files(folder)))  # bf16
        drafter *= size / 2
        if ranks > 1:
            matrices = 1 if raw.get("tie_word_embeddings") else 2
            drafter += matrices * target.vocab_size * target.hidden_size * size
        drafter_raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        drafter_kv = read_shape(drafter_raw, size).kv_bytes(1)
        taps = len(drafter_raw.get("target_layer_ids") or ())
    rows = engine.max_step_rows
    # Logits, p, and q where something was drafted.
    per_token = size + (8.0 if gamma else 4.0)
    logits = min(rows, engine.max_running * (1 + gamma)) * target.vocab_size * per_token
    logits = logits if is_first else logits / ranks
    kept = engine.max_running * gamma * target.vocab_size * 4.0 if is_first else 0.0
    widest = 2 * max(int(raw.get("intermediate_size", 0)), target.hidden_size)
    step = logits + kept + rows * (widest + (4 + taps) * target.hidden_size) * size + _RUNTIME_BYTES
    graphs = 0.0
    if engine.cuda_graphs and ranks == 1:
        most = min(engine.max_running * (1 + gamma), rows)
        # What a pass leaves behind for each size, and the widest activations once, for all of them.
        graphs = (sum(capture_sizes(most)) * (1 + taps) * target.hidden_size + most * 4 * widest) * size
        if drafter:
            slots = sum(capture_sizes(engine.max_running * (gamma + 1)))
            graphs += slots * target.hidden_size * size
    kv_size = 1 if engine.kv_dtype == "fp8" else size
    kv_token = target.kv_bytes(1) * kv_size / size / min(ranks, target.num_kv_heads) + drafter_kv
    return DeviceNeeds(weights, drafter, step, float(graphs), kv_token * engine.kv_block_size)


def check_fits(needs: DeviceNeeds, config: AppConfig, free_bytes: float) -> None:
    """`ConfigError` that says what would fit, where the engine needs more than `free_bytes`."""
    engine, block = config.engine, config.engine.kv_block_size
    kv = needs.kv_per_block * engine.kv_num_blocks
    if needs.fixed + kv <= free_bytes:
        return
    parts = {
        "weights": needs.weights,
        "drafter": needs.drafter,
        "KV": kv,
        "graphs": needs.graphs,
        "step": needs.step,
    }
    listed = ", ".join(f"{name} {part / GIB:.2f}" for name, part in parts.items())
    blocks = int((free_bytes - needs.fixed) / needs.kv_per_block)
    longest = -(-config.model.max_model_len // block)
    if blocks >= max(2, longest):
        cure = f"set engine.kv_num_blocks to at most {blocks} ({blocks * block} tokens)"
    elif blocks >= 2:
        cure = (
            f"only {blocks} KV blocks would fit: set engine.kv_num_blocks to that and model.max_model_len to "
            f"at most {blocks * block}, or see to more room"
        )
    else:
        cure = (
            f"without any KV {needs.fixed / GIB:.2f} GiB are needed: set model.quantization to fp8, lower "
            "engine.max_running or max_step_rows, or take a larger GPU or a smaller model"
        )
    raise ConfigError(
        f"the engine needs {(needs.fixed + kv) / GIB:.2f} GiB of the GPU ({listed}) and "
        f"{free_bytes / GIB:.2f} GiB are free; {cure}"
    )
