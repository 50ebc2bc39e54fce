"""What a result file says of its machine, and what it does not."""

import json

from dspark_ray.core.config import parse_app_config
from dspark_ray.profiling.machine import machine_facts, portable_config


def test_facts_are_plain() -> None:
    facts = machine_facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["threads"] >= 1


def test_no_absolute_path_gets_out() -> None:
    config = parse_app_config(
        {
            "model": {"source": "/home/someone/model"},
            "speculation": {
                "drafter": {"kind": "dspark", "path": "/home/someone/drafter"},
                "step_table": "/home/someone/table.json",
                "temperatures": "relative/temperatures.json",
            },
        }
    )
    text = json.dumps(portable_config(config))
    assert "someone" not in text
    assert "relative/temperatures.json" in text
    assert portable_config(parse_app_config({}))["model"]["source"] == "default"
