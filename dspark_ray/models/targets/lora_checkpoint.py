"""LoRA adapters on disk, in PEFT's layout: `adapter_config.json` beside `adapter_model.safetensors`.

ref = adapter_ref("sql", path)  # name, path and digest, without reading the tensors into memory
settings = read_settings(path, max_rank=64)

Loading fails closed: a setting that changes what the adapter computes and is not carried out here is refused
by its name, never ignored.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_ray.core.digest import digest_json, sha256_file
from dspark_ray.core.errors import CheckpointError
from dspark_ray.core.json_file import read_json_object
from dspark_ray.core.types import AdapterRef

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

# Settings that are read below, that only training needs, or that the names of the tensors say again.
_KNOWN = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "init_lora_weights", "target_modules"),
        *(
            "auto_mapping",
            "base_model_name_or_path",
            "revision",
            "task_type",
            "inference_mode",
            "peft_version",
        ),
        *("lora_dropout", "eva_config", "loftq_config", "corda_config", "lora_ga_config", "runtime_config"),
        *("exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size"),
        "ensure_weight_tying",
    }
)
_NOTHING: tuple[Any, ...] = (None, False, {}, [], "none")
# The others (PiSSA, OLoRA, CorDA, LoftQ) train against changed weights of the model.
_INITIALISATIONS: tuple[Any, ...] = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """What adapter_config.json says about the arithmetic."""

    rank: int
    scaling: float  # of B·A·x


def read_settings(path: Path, max_rank: int) -> AdapterSettings:
    """Raises `CheckpointError` for an adapter that cannot be served, with the reason."""
    file = path / CONFIG_FILE
    raw = read_json_object(file, CheckpointError)
    if raw.get("peft_type") != "LORA":
        raise CheckpointError(f"{file}: peft_type is {raw.get('peft_type')!r}; only LORA adapters are served")
    for name, value in raw.items():
        if name not in _KNOWN and value not in _NOTHING:
            raise CheckpointError(f"{file}: {name} = {str(value)[:64]} is not supported")
    if raw.get("init_lora_weights") not in _INITIALISATIONS:
        raise CheckpointError(
            f"{file}: init_lora_weights {raw['init_lora_weights']!r} changes the model's own weights; "
            "convert the adapter to plain LoRA (PEFT's path_initial_model_for_weight_conversion)"
        )
    rank, alpha = raw.get("r"), raw.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise CheckpointError(f"{file}: r is {rank!r}, not a rank")
    if rank > max_rank:
        raise CheckpointError(f"{file}: rank {rank} exceeds lora.max_rank {max_rank}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise CheckpointError(f"{file}: lora_alpha is {alpha!r}, not a number")
    return AdapterSettings(rank, alpha / (rank**0.5 if raw.get("use_rslora") else rank))


def adapter_ref(name: str, path: Path) -> AdapterRef:
    """The adapter at `path` as requests name it; `CheckpointError` where its files are not."""
    return AdapterRef(name, str(path), adapter_digest(path))


def adapter_digest(path: Path) -> str:
    """Of both files: the same for the same adapter, wherever it lies."""
    try:
        return digest_json([sha256_file(path / name) for name in (CONFIG_FILE, WEIGHTS_FILE)])
    except OSError as error:
        raise CheckpointError(f"cannot read the adapter {path}: {error}") from error
