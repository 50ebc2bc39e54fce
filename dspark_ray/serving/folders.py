"""Folders that clients may name: none outside the one that the configuration opens is even looked at."""

from pathlib import Path

from dspark_ray.core.errors import RequestError

MAX_PATH = 256  # characters; an error repeats them


def below(root: str | None, path: str, param: str) -> Path:
    """`path` made absolute from `root`; `RequestError` if it leads outside, or is no path."""
    assert root is not None, "the configuration opens no folder"
    base = Path(root).resolve()
    try:
        folder = (base / path).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in it, a part too long, a circle of links
        raise RequestError(f"{path!r} is no path", param=param, code="invalid_value") from error
    if not folder.is_relative_to(base):
        message = f"{path!r} is not below the folder that this server loads from"
        raise RequestError(message, param=param, code="invalid_value")
    return folder
