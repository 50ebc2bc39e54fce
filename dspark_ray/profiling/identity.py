"""What a step table depends on: a table made for anything else is never used.

The target counts by its configuration and its tensors' names, shapes and types, since no value of a weight
changes a step's time.
"""

import functools
import hashlib
import platform
import struct
from pathlib import Path
from typing import Any

import dspark_kernels
import torch
from dspark_kernels.attention_libraries import installed_versions

from dspark_ray.core.config import MODEL_FREE_DRAFTERS, AppConfig
from dspark_ray.core.digest import digest_json, sha256_file
from dspark_ray.core.errors import CheckpointError
from dspark_ray.core.types import VerificationMode
from dspark_ray.models.drafters.confidence import drafter_digest
from dspark_ray.models.weights import safetensors_files

PROFILER_VERSION = 4  # changes when the same machine would measure something else


def table_identity(config: AppConfig, model_dir: Path) -> dict[str, Any]:
    """`StepTable.made_from` of an engine that `config` describes, on this machine, with these threads.

    Raises `CheckpointError` for a drafter or a target that cannot be read.
    """
    drafter = config.speculation.drafter
    drafts = drafter.kind != "none" and config.speculation.mode is not VerificationMode.OFF
    return {
        "profiler": PROFILER_VERSION,
        "target": target_digest(model_dir),
        "drafter": _drafter(config) if drafts else "none",
        "num_draft_tokens": config.speculation.num_draft_tokens if drafts else 0,
        "dtype": config.model.dtype,
        "quantization": config.model.quantization,
        "max_model_len": config.model.max_model_len,
        "kv_block_size": config.engine.kv_block_size,
        "max_running": config.engine.max_running,
        "max_step_rows": config.engine.max_step_rows,
        "hardware": hardware_name(config.model.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "kernels": kernels_digest(),
        **_ranks(config),
        **_attention(config),
        **({} if config.engine.kv_dtype == "auto" else {"kv_dtype": config.engine.kv_dtype}),
    }


def _ranks(config: AppConfig) -> dict[str, Any]:
    """Nothing for one: tables of before there were several stay as they are."""
    count, placement = config.engine.tensor_parallel_size, config.engine.rank_placement
    return {"ranks": f"{count}, {placement}"} if count > 1 else {}


def _attention(config: AppConfig) -> dict[str, Any]:
    """Libraries among which an engine on a GPU chooses; nothing where it has its own kernels anyway."""
    wanted = config.engine.attention
    if wanted == "own" or config.model.device == "cpu" or not torch.cuda.is_available():
        return {}
    versions = installed_versions()
    return {"attention": {"wanted": wanted, **versions}} if versions else {}


def target_digest(model_dir: Path) -> str:
    """16 hex digits of config.json and of the headers of the weight files."""
    headers = [_safetensors_header(path) for path in safetensors_files(model_dir)]
    return digest_json([sha256_file(model_dir / "config.json"), *headers])


def hardware_name(device: str = "auto") -> str:
    """The own name of the processor that `model.device` means."""
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@functools.cache
def kernels_digest() -> str:
    """16 hex digits of the kernels' source files."""
    sha = hashlib.sha256()
    folder = Path(dspark_kernels.__file__).parent
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".py", ".cpp", ".h", ".cu"):
            sha.update(path.name.encode() + path.read_bytes())
    return sha.hexdigest()[:16]


def _drafter(config: AppConfig) -> str:
    drafter = config.speculation.drafter
    if drafter.path is not None and drafter.kind not in MODEL_FREE_DRAFTERS:
        try:
            return drafter_digest(Path(drafter.path))
        except OSError as error:
            raise CheckpointError(f"cannot read the drafter {drafter.path}: {error.strerror}") from error
    return f"{drafter.kind} {drafter.ngram_min}-{drafter.ngram_max}"


def _safetensors_header(path: Path) -> str:
    """Digest of a file's table of tensors: its first 8 bytes are that table's length."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return hashlib.sha256(file.read(length)).hexdigest()
