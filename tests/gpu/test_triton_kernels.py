"""The kernels compiled: the cases of tests/contract/test_triton_kernels.py on the GPU."""

import pytest
import torch

from tests.contract.test_triton_kernels import *  # noqa: F403


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda")
