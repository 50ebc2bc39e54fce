"""Tests against the real vLLM: `make test-vllm`. Without it they are skipped."""

import pytest

pytest.importorskip("vllm")
