"""JSON objects that users and operators put on disk."""

import json
from pathlib import Path
from typing import Any

from dspark_ray.core.errors import DsparkError


def read_json_object(path: Path, error_type: type[DsparkError], kind: str = "") -> dict[str, Any]:
    """The object in a file. Raises `error_type`, which names the file (as a `kind`, in words), whatever it is
    that is wrong with it."""
    what = f"the {kind} {path}" if kind else str(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise error_type(f"cannot read {what}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested beyond reason
        raise error_type(f"{what} is damaged: {error}") from error
    if not isinstance(data, dict):
        raise error_type(f"{what} does not hold a JSON object")
    return data
