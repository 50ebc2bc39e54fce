"""Every test: one torch thread, and the marker of the folder it lies in (`ray`, `e2e`, `gpu`)."""

import os
from pathlib import Path

import pytest
import torch

TESTS_DIR = Path(__file__).parent
FOLDER_MARKERS = ("ray", "e2e", "gpu")

torch.set_num_threads(1)
if not torch.cuda.is_available():  # Triton's kernels run through its interpreter; read when they are imported
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(TESTS_DIR).parts[0]
        if folder in FOLDER_MARKERS:
            item.add_marker(folder)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
