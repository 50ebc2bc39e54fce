"""Folders that clients may name: none outside the one that the configuration opens is even looked at."""

from pathlib import Path

from dspark_ray.core.errors import RequestError


def below(root: str | None, path: str, param: str) -> Path:
    """`path` made absolute from `root`; `RequestError` if it leads outside."""
    assert root is not None, "the configuration opens no folder"
    base = Path(root).resolve()
    folder = (base / path).resolve()
    if not folder.is_relative_to(base):
        message = f"{path!r} is not below the folder that this server loads from"
        raise RequestError(message, param=param, code="invalid_value")
    return folder
