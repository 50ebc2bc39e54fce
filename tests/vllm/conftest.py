"""Tests against the real vLLM: `make test-vllm`. Without it they are skipped."""

from pathlib import Path

import pytest

from dspark_ray.vllm_engine.plugin import ENTRY_POINT, GROUP

pytest.importorskip("vllm")


def entry_point_dir(folder: Path) -> Path:
    """To be put on a path: the package's entry point, for a checkout that is not installed."""
    metadata = folder / "dspark_ray_plugin-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: dspark-ray-plugin\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        f"[{GROUP}]\n{ENTRY_POINT} = dspark_ray.vllm_engine.plugin:register\n"
    )
    return folder
