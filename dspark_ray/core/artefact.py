"""Measured files (step tables, temperatures): written whole, and refused when made for something else."""

import json
from pathlib import Path
from typing import Any

from dspark_ray.core.errors import ArtefactError
from dspark_ray.core.json_file import read_json_object


def save_json(path: Path, data: dict[str, Any]) -> None:
    """Written beside and renamed, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def load_json(path: Path, kind: str, *formats: str) -> dict[str, Any]:
    """The object on disk without its `format` key; raises `ArtefactError` naming the file."""
    return check_format(read_json_object(path, ArtefactError, kind), f"{kind} {path}", *formats)


def check_format(data: Any, what: str, *formats: str) -> dict[str, Any]:
    """`data` without its `format` key; raises `ArtefactError` if it is no object of one of the formats."""
    if not isinstance(data, dict) or data.get("format") not in formats:
        raise ArtefactError(f"{what}: this is not in the format {' or '.join(map(repr, formats))}")
    return {key: value for key, value in data.items() if key != "format"}


def check_made_from(what: str, made_from: dict[str, Any], expect: dict[str, Any] | None, cure: str) -> None:
    """Raises `ArtefactError` naming the first key of `expect` that `made_from` lacks or contradicts."""
    for key, value in (expect or {}).items():
        if key not in made_from:
            raise ArtefactError(f"{what} does not say what {key} it was made for (here: {value}); {cure}")
        if made_from[key] != value:
            raise ArtefactError(f"{what} was made for {key}={made_from[key]}, not {value}; {cure}")
