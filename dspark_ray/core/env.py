"""Environment variables, all of them here: read when asked, and checked (a value that cannot work fails).

They say where things lie on this machine; what the program does is the configuration's business.

| variable | meaning | default |
|---|---|---|
| `DSPARK_CACHE_DIR` | converted models, step tables: what can be made again | `~/.cache/dspark-ray` |
"""

import os
from pathlib import Path

from dspark_ray.core.errors import ConfigError

CACHE_DIR_VARIABLE = "DSPARK_CACHE_DIR"
_DEFAULT_CACHE_DIR = "~/.cache/dspark-ray"


def cache_dir() -> Path:
    """The cache folder (not created here); `ConfigError` for a value that is no folder's absolute path."""
    value = os.environ.get(CACHE_DIR_VARIABLE)
    if value is None:
        return Path(_DEFAULT_CACHE_DIR).expanduser()
    path = Path(value).expanduser()
    # A relative path would mean another folder for each process: Ray starts workers elsewhere.
    if not value.strip() or not path.is_absolute():
        raise ConfigError(f"{CACHE_DIR_VARIABLE} must be an absolute path, not {value!r}")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{CACHE_DIR_VARIABLE} is {value!r}, which is not a folder")
    return path
