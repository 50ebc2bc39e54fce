"""The config.json of a model or drafter, without the network.

In order: a local directory; the shapes that ship in `configs/models/` (each says where it is from); the
hub's own cache. `None` where none of them has it: what cannot be known is not judged.
"""

from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from dspark_ray.core.config import DEFAULT_SOURCE, DrafterConfig
from dspark_ray.core.errors import ConfigError
from dspark_ray.core.json_file import read_json_object

SHIPPED = Path(__file__).resolve().parents[2] / "configs" / "models"
DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def model_config(source: str) -> dict[str, Any] | None:
    """Of `model.source`: 'default', a directory, or a hub id `owner/name[@revision]`."""
    if source == DEFAULT_SOURCE:
        return _shipped(DEFAULT_MODEL)
    folder = Path(source).expanduser()
    if folder.is_dir():
        return _of_directory(folder)
    return _of_hub_id(source)


def drafter_config(drafter: DrafterConfig) -> dict[str, Any] | None:
    """Of the drafter's own checkpoint; None without one."""
    if drafter.path is not None:
        return _of_directory(Path(drafter.path))
    return None if drafter.hub_id is None else _of_hub_id(drafter.hub_id)


def weight_bytes(source: str) -> int | None:
    """The size of a local directory's safetensors files; None for anything else."""
    folder = Path(source).expanduser()
    if source == DEFAULT_SOURCE or not folder.is_dir():
        return None
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) or None


def _of_directory(folder: Path) -> dict[str, Any] | None:
    path = folder / "config.json"
    return (
        read_json_object(path, ConfigError) if path.is_file() else None
    )  # who loads it says what is missing


def _of_hub_id(hub_id: str) -> dict[str, Any] | None:
    name, _, revision = hub_id.partition("@")
    shipped = None if revision else _shipped(name)
    if shipped is not None:
        return shipped
    try:
        cached = try_to_load_from_cache(name, "config.json", revision=revision or None)
    except ValueError:  # no hub id
        return None
    return read_json_object(Path(cached), ConfigError) if isinstance(cached, str) else None


def _shipped(hub_id: str) -> dict[str, Any] | None:
    path = SHIPPED / f"{hub_id}.json"
    return read_json_object(path, ConfigError) if path.is_file() else None
