"""Whatever is wrong with a JSON file, the error is the caller's, and names the file."""

from pathlib import Path

import pytest

from dspark_ray.core.errors import CheckpointError
from dspark_ray.core.json_file import read_json_object


def test_an_object_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": "é"}', encoding="utf-8")
    assert read_json_object(path, CheckpointError) == {"a": "é"}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is damaged"),
        (b"{", "is damaged"),
        (b"\xff\x00", "is damaged"),
        (b"[" * 100_000, "is damaged"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is damaged"),
        (b"[1]", "does not hold a JSON object"),
        (b"null", "does not hold a JSON object"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"the adapter .*a\.json {reason}"):
        read_json_object(path, CheckpointError, "adapter")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*none\.json: No such file"):
        read_json_object(tmp_path / "none.json", CheckpointError)
    with pytest.raises(CheckpointError, match="Is a directory"):
        read_json_object(tmp_path, CheckpointError)
