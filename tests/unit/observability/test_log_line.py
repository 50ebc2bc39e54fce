"""The ten-second line."""

from dspark_ray.observability.log_line import log_line
from tests.unit.observability.snapshots import snapshot


def test_figures_are_of_the_interval():
    line = log_line(snapshot(scale=3), snapshot(scale=1), elapsed_s=10.0)
    assert line == (
        "engine-0: tau 2.08 | accepted by position 0.80 0.62 0.50 | budget 2.0/step | 5.4 tok/s | "
        "running 2 waiting 3 | KV 25%"
    )


def test_without_data_there_are_dashes():
    line = log_line(snapshot(kv_total_blocks=0), snapshot(), elapsed_s=10.0)
    assert "tau – | accepted by position – | budget –/step | 0.0 tok/s" in line
    assert "KV –%" in line


def test_a_position_never_verified_is_a_dash_among_figures():
    line = log_line(snapshot(scale=3, block_size=4), snapshot(block_size=4), elapsed_s=10.0)
    assert "0.80 0.62 0.50 –" in line
