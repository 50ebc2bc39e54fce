"""A folder that a server loads adapters and drafters from, with good ones and damaged ones in it."""

import json
from pathlib import Path

from tests.tiny_engine import tiny_drafter_dir
from tests.tiny_lora import write_adapter

GOOD_ADAPTER, GOOD_DRAFTERS = "adapter", ("drafter-a", "drafter-b")
NAMES = (
    GOOD_ADAPTER, *GOOD_DRAFTERS, "empty", "no-weights", "garbage-weights", "garbage-config", "deep-config",
    "huge-rank", "a-file", "link-outside", "temperatures.json", "nothing-here",
)  # fmt: skip
"""Everything that `write_loadable` makes, and one that it does not."""


def write_loadable(folder: Path, vocab_size: int) -> Path:
    """For tests/tiny_engine.py's target; returns `folder`."""
    write_adapter(folder / GOOD_ADAPTER, "attention")
    for seed, name in enumerate(GOOD_DRAFTERS, start=2):
        tiny_drafter_dir(folder / name, vocab_size, draft_vocab=None, seed=seed)
    config = (folder / GOOD_ADAPTER / "adapter_config.json").read_text(encoding="utf-8")
    settings = json.loads(config)
    damaged: dict[str, dict[str, bytes]] = {
        "empty": {},
        "no-weights": {"adapter_config.json": config.encode()},
        "garbage-weights": {
            "adapter_config.json": config.encode(),
            "adapter_model.safetensors": b"\xff" * 64,
            "config.json": (folder / GOOD_DRAFTERS[0] / "config.json").read_bytes(),
            "model.safetensors": (1 << 60).to_bytes(8, "little") + b"{}",
        },
        "garbage-config": {"adapter_config.json": b"\xff\x00", "config.json": b'{"a": NaN'},
        "deep-config": {"adapter_config.json": b"[" * 50_000, "config.json": b"[" * 50_000},
        "huge-rank": {"adapter_config.json": json.dumps({**settings, "r": 10**400}).encode()},
    }
    for name, files in damaged.items():
        (folder / name).mkdir()
        for file, content in files.items():
            (folder / name / file).write_bytes(content)
    (folder / "a-file").write_bytes(b"x")
    (folder / "temperatures.json").write_bytes(b'{"temperatures": "none"}')
    (folder / "link-outside").symlink_to("/")
    return folder
