"""Replicas on two machines, as two Ray nodes of this one."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.ray.conftest import _ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
NOTICE = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "3"}  # sooner than usual


def test_a_dead_node_costs_no_token(model_dir: Path, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    python_path = f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"
    child = subprocess.run(
        [sys.executable, "-m", "tests.ray.two_nodes", str(model_dir)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        env={
            **environment,
            **_ENVIRONMENT,
            **NOTICE,
            "PYTHONPATH": python_path,
            "DSPARK_CACHE_DIR": str(tmp_path),
        },
    )
    assert child.returncode == 0, child.stderr[-4000:]
    told = json.loads(child.stdout.splitlines()[-1])
    assert told["nodes"] == 2
    assert told["lost_streams"] >= 1
    assert told["whole_streams"] == 8
    assert told["victim_is_gone"]
    assert told["replicas_left"] == 1  # there is no room for another one
