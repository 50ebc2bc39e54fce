"""Small scenarios, and a table on which trimming pays."""

from pathlib import Path
from typing import Any

import numpy as np

from dspark_ray.scheduling.step_table import StepTable
from dspark_ray.simulator.run import Result, Setting, prepare, simulate
from dspark_ray.simulator.scenario import Scenario, parse_scenario

STEEP_TABLE = StepTable(
    rows=np.array([1, 4, 8, 16, 64, 256]),
    verify_ms=np.array([10.0, 10.5, 12.0, 16.0, 50.0, 200.0]),
    requests=np.array([1, 64]),
    draft_ms=np.array([0.5, 2.0]),
)
CONDITIONAL = [0.7, 0.65, 0.6, 0.6]


def scenario(tmp_path: Path, **changes: Any) -> Scenario:
    """Two replicas, five seconds; `changes` replace top-level keys."""
    STEEP_TABLE.save(tmp_path / "table.json")
    engine = {"max_running": 8, "max_step_rows": 256, "kv_num_blocks": 512, "max_waiting": 64}
    data: dict[str, Any] = {
        "duration_s": 5,
        "replicas": [{"count": 2, "step_table": "table.json", "engine": engine, "start_up_s": 5}],
        "speculation": {"mode": "adaptive", "num_draft_tokens": 4},
        "arrivals": {"kind": "poisson", "rate_per_s": 6},
        "tasks": [
            {
                "name": "chat",
                "prompt_tokens": {"mean": 40},
                "output_tokens": {"mean": 60},
                "acceptance": {"conditional": CONDITIONAL},
            }
        ],
    }
    return parse_scenario({**data, **changes}, tmp_path)


def run(tmp_path: Path, **changes: Any) -> Result:
    return simulate(scenario(tmp_path, **changes))


def setting(tmp_path: Path, **changes: Any) -> Setting:
    return prepare(scenario(tmp_path, **changes))
