"""Short content digests: what an artefact was made from, so that a mismatch is found at load."""

import hashlib
import json
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 1 << 20


def digest_json(value: Any) -> str:
    """16 hex digits of the canonical JSON of `value`."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sha256_file(path: Path) -> str:
    """The full SHA-256 of a file, 64 hex digits."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            sha.update(chunk)
    return sha.hexdigest()
