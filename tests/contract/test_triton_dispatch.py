"""Which version of the kernels runs, and that every Triton kernel compiles for a GPU that is not here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dspark_kernels import choose, dispatch, sampling, torch_ops

ROOT = Path(__file__).parents[2]


def test_triton_on_cpu_tensors_is_the_interpreter_or_an_error(monkeypatch, caplog):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(dispatch.KernelsError, match="TRITON_INTERPRET=1"):
        dispatch.choose("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.choose("triton").__name__ == "dspark_kernels.triton_ops"
    assert "interpreter" in caplog.text


def test_cuda_tensors_get_triton_or_a_reason(monkeypatch, caplog):
    pytest.importorskip("triton")
    for requested in ("auto", "triton"):
        assert dispatch.choose_for_cuda(requested).__name__ == "dspark_kernels.triton_ops"
    for requested in ("torch", "cpu"):
        assert dispatch.choose_for_cuda(requested) is torch_ops

    def missing():
        raise dispatch.KernelsError("Triton cannot be imported")

    monkeypatch.setattr(dispatch, "_triton_ops", missing)
    assert dispatch.choose_for_cuda("auto") is torch_ops
    assert "Triton cannot be imported" in caplog.text
    with pytest.raises(dispatch.KernelsError):
        dispatch.choose_for_cuda("triton")


def test_ops_of_another_device_go_to_the_reference():
    assert dispatch.ops_for(torch.empty(1, device="meta")) is torch_ops


def test_public_functions_of_the_ops_of_a_step():
    ids, start = torch.tensor([3, 1, 2]), torch.tensor([0, 3], dtype=torch.int32)
    counts, following = sampling.leading_matches(ids, torch.tensor([3, 1, 0]), start, 2)
    assert (counts.tolist(), following.tolist()) == ([2], [2])
    probs = torch.eye(4)[ids]
    keys, uniforms = torch.zeros(1, dtype=torch.int64), torch.zeros(3, dtype=torch.float64)
    counts, following = sampling.accept(probs, torch.tensor([3, 0, 0]), start, 2, uniforms, keys)
    assert (counts.tolist(), following.tolist()) == ([1], [1])
    chances, budget = torch.tensor([[0.9, 0.1], [0.8, 0.7]]), torch.tensor([3], dtype=torch.int32)
    lens = sampling.survival_lengths(chances, budget, torch.tensor([2, 2], dtype=torch.int32))
    assert lens.tolist() == [1, 2]
    logits = choose.markov_logits(torch.zeros(1, 2), torch.eye(2), torch.eye(2), torch.tensor([1]))
    assert logits.tolist() == [[0.0, 1.0]]


def test_every_triton_kernel_compiles_for_a_gpu():
    """The interpreter takes what the compiler refuses: this is the compiler."""
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/compile_triton.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    sources = (ROOT / "kernels/dspark_kernels").glob("triton_*.py")
    kernels = {
        line.split("(")[0].removeprefix("def ")
        for source in sources
        for line in source.read_text(encoding="utf-8").splitlines()
        if line.startswith("def _") and "_kernel(" in line
    }
    assert set(done.stdout.split()) == kernels
