"""Diagrams are drawn from results as they come: unsorted, with gaps."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from dspark_ray.training.plots import plot_sweep, plot_thresholds


def test_a_sweep_is_drawn_by_depth_and_by_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    rows = [
        {
            "kind": kind,
            "num_layers": depth,
            "block_size": block,
            "report": {"tau_sampling": depth + block / 10, "tau_greedy": float("nan")},
        }
        for depth, block in ((2, 7), (1, 7), (2, 15), (2, 4))
        for kind in ("dspark", "dflash")
    ]
    heads = [
        {"block_size": block, "requests": requests, "share": block / 1000}
        for block in (7, 4)
        for requests in (1, 8)
    ]
    plot_sweep(rows, heads, tmp_path / "sweep.png", depth=2, block=7)
    by_depth, by_length, cost = drawn[0].axes
    np.testing.assert_allclose(by_depth.lines[0].get_xydata(), [[1, 1.7], [2, 2.7]])
    np.testing.assert_allclose(by_length.lines[0].get_xydata(), [[4, 2.4], [7, 2.7], [15, 3.5]])
    np.testing.assert_allclose(cost.lines[1].get_xydata(), [[4, 0.4], [7, 0.7]])  # per cent
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_threshold_that_verifies_nothing_leaves_a_gap(tmp_path: Path) -> None:
    reports = [(0.5, 0.6), (0.0, 0.4), (1.0, None)]
    rows = [
        {
            "drafter": "d",
            "prompts": "p",
            "temperature": 0.0,
            "threshold": threshold,
            "report": {"accepted_share": share, "tau": 1.5, "verified_tokens_per_step": 1.0},
        }
        for threshold, share in reports
    ]
    plot_thresholds(rows, tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
