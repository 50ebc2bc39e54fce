"""Arrivals of an open loop."""

import json
from pathlib import Path

import numpy as np
import pytest

from dspark_ray.profiling.arrivals import logged_arrivals, random_arrivals


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_rate_and_shape(burstiness: float) -> None:
    times = random_arrivals(5.0, 20_000, np.random.default_rng(1), burstiness)
    gaps = np.diff(times)
    assert times[0] == 0
    assert (gaps >= 0).all()
    assert np.mean(gaps) == pytest.approx(1 / 5.0, rel=0.05)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_the_seed_fixes_them() -> None:
    first, again = (random_arrivals(1.0, 8, np.random.default_rng(3)) for _ in range(2))
    assert (first == again).all()


def test_a_log_is_replayed_at_a_speed(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    rows = [{"arrived_ms": t, "prompt_tokens": 4, "output_tokens": n} for t, n in ((500, 7), (100, 9))]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    times, tokens = logged_arrivals(path, 5, speed=2.0)
    assert times.tolist() == [0.0, 0.2]
    assert tokens.tolist() == [9, 7]
    assert len(logged_arrivals(path, 1)[0]) == 1
