"""Environment variables, all of them here: read when asked, and checked (a value that cannot work fails).

They say where things lie on this machine, and hold what no file should; what the program does is the
configuration's business.

| variable | meaning | default |
|---|---|---|
| `DSPARK_CACHE_DIR` | converted models, step tables: what can be made again | `~/.cache/dspark-ray` |
| `DSPARK_API_KEYS` | hashes of API keys, a JSON line each (`security.api_keys_from_environment`) | none |
| `DSPARK_API_KEY` | the key that commands show to a server (`chat`, `top`, `bench --url`, ...) | none |
"""

import os
from pathlib import Path

from dspark_ray.core.errors import ConfigError

CACHE_DIR_VARIABLE = "DSPARK_CACHE_DIR"
API_KEYS_VARIABLE = "DSPARK_API_KEYS"
API_KEY_VARIABLE = "DSPARK_API_KEY"
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


def api_key_lines() -> list[str]:
    """The hashes of the API keys that a server accepts; `ConfigError` if there are none."""
    value = os.environ.get(API_KEYS_VARIABLE, "")
    if not value.strip():
        raise ConfigError(f"security.api_keys_from_environment is set and {API_KEYS_VARIABLE} is empty here")
    return value.splitlines()


def client_headers() -> dict[str, str]:
    """What a command sends along to a server that wants a key."""
    key = os.environ.get(API_KEY_VARIABLE, "").strip()
    return {"Authorization": f"Bearer {key}"} if key else {}
