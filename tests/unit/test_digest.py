"""Digests depend on content only."""

import hashlib
from pathlib import Path

from dspark_ray.core.digest import digest_json, sha256_file


def test_key_order_does_not_matter_and_values_do() -> None:
    assert digest_json({"a": 1, "b": [2, 3]}) == digest_json({"b": [2, 3], "a": 1})
    assert digest_json({"a": 1}) != digest_json({"a": 2})
    assert digest_json([1, 2]) != digest_json([2, 1])
    assert len(digest_json(None)) == 16


def test_file_digest(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000  # more than one chunk
    (tmp_path / "file").write_bytes(data)
    assert sha256_file(tmp_path / "file") == hashlib.sha256(data).hexdigest()
