"""The GPU check's script, with tiny shapes on the CPU: that it runs, and that a failure costs one figure."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    path = ROOT / f"benchmarks/gpu/{name}.py"
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


gpu_check, Results = script("check"), script("timing").Results


def check(out: Path, *arguments: str) -> tuple[int, dict]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "benchmarks/gpu/check.py", "--device", "cpu", "--tiny", "--out", str(out)]
    done = subprocess.run([*command, *arguments], cwd=ROOT, env=environment, check=False)
    return done.returncode, json.loads((out / "check.json").read_text(encoding="utf-8"))


def test_the_sections_that_measure(tmp_path):
    code, found = check(tmp_path, "--only", "model", "attention")
    assert code == 0
    model = found["sections"]["model"]["results"]
    assert model["memory"]["one_token_ms"] > 0
    assert set(model["heads"]["by_gamma"]) == {"4", "8", "16"}
    assert model["step_table"]["requests"] == [1, 2, 4]
    assert {row["requests"] for row in model["policies"]} == {1, 4}
    assert {row["rule"] for row in model["acceptance"]} == {"greedy", "sampled", "filtered"}
    assert (
        [row["requests"] for row in model["steps"]] == [row["requests"] for row in model["drafting"]] == [1]
    )
    assert model["steps"][0]["step_ms"] > 0
    (attention,) = found["sections"]["attention"]["results"].values()
    assert attention["largest_difference"] < 1e-4


def test_a_figure_that_fails_is_a_result_and_the_others_stay(tmp_path, capsys):
    results = Results(tmp_path / "found.json")
    assert results.measure("lost", lambda: 1 / 0) is None
    assert results.measure("kept", lambda: 2) == 2
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found == {"lost": {"error": "ZeroDivisionError: division by zero"}, "kept": 2}
    assert results.failures == 1


def test_a_section_that_crashes_or_hangs_is_reported(tmp_path):
    crash = gpu_check._run(
        gpu_check.Section("crash", 10, ("-c", "import os; print('why'); os._exit(7)")), tmp_path
    )
    hang = gpu_check._run(gpu_check.Section("hang", 0.3, ("-c", "import time; time.sleep(60)")), tmp_path)
    assert crash["status"] == "exit status 7"
    assert hang["status"].startswith("stopped after")
    assert "why" in (tmp_path / "crash.log").read_text(encoding="utf-8")
