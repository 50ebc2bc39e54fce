"""Imports go down only, in the source tree and when the packages are really imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.floors import FLOORS, NO_TORCH, PROGRAM, check_tree

ROOT = Path(__file__).resolve().parents[2]

# Imports every module of the packages named after --, with the comma-separated modules blocked.
IMPORT_ALL = """
import importlib, importlib.abc, pkgutil, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1].split(","):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
for package in sys.argv[2:]:
    module = importlib.import_module(package)
    for info in pkgutil.walk_packages(module.__path__, package + "."):
        importlib.import_module(info.name)
"""


def _import_all(packages: list[str], blocked: str) -> None:
    present = [name for name in packages if (ROOT / PROGRAM / name).is_dir()]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, blocked, *(f"{PROGRAM}.{name}" for name in present)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr


def test_the_tree_keeps_to_its_floors() -> None:
    assert check_tree(ROOT) == []


def test_pure_packages_import_without_torch_and_ray() -> None:
    _import_all(sorted(NO_TORCH), "torch,ray,transformers,safetensors,fastapi,dspark_kernels")


def test_lower_floors_import_without_ray() -> None:
    _import_all([name for name, floor in FLOORS.items() if floor <= 3], "ray,vllm,fastapi")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A clean tree with one empty module in every package."""
    for name in FLOORS:
        folder = tmp_path / ("deployments" if name == "deployments" else f"{PROGRAM}/{name}")
        folder.mkdir(parents=True)
        (folder / "module.py").write_text("import json\n", encoding="utf-8")
    (tmp_path / PROGRAM / "__init__.py").write_text("", encoding="utf-8")
    (tmp_path / "kernels" / "dspark_kernels").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("dspark_ray/engine/module.py", "from dspark_ray.core.types import Request"),
        ("dspark_ray/engine/module.py", "from . import sampling\nfrom ..models import weights"),
        ("dspark_ray/models/module.py", "import torch\nfrom dspark_kernels.norm import rms_norm"),
        ("dspark_ray/runtime/module.py", "import ray"),
        ("dspark_ray/core/module.py", "from dspark_ray import __version__"),
        (
            "deployments/module.py",
            "import ray\nfrom dspark_ray.serving import app\nfrom deployments import x",
        ),
        (
            "kernels/dspark_kernels/module.py",
            "import torch\nfrom .norm import rms_norm\nimport dspark_kernels.x",
        ),
    ],
)
def test_what_is_allowed(tree: Path, file: str, source: str) -> None:
    (tree / file).write_text(source, encoding="utf-8")
    assert check_tree(tree) == []


@pytest.mark.parametrize(
    ("file", "source", "reason"),
    [
        (
            "dspark_ray/core/module.py",
            "from dspark_ray.engine import engine",
            "core (floor 0) imports upwards",
        ),
        ("dspark_ray/core/module.py", "from dspark_ray import engine", "imports upwards"),
        ("dspark_ray/core/module.py", "from ..engine import engine", "imports upwards"),
        ("dspark_ray/models/module.py", "def f():\n    import dspark_ray.engine.x", "imports upwards"),
        ("dspark_ray/models/sub/x.py", "from ...engine.x import y", "imports upwards"),
        (
            "dspark_ray/models/module.py",
            "import dspark_ray.simulator",
            "models imports its sibling simulator",
        ),
        ("dspark_ray/calibration/module.py", "from ..scheduling import x", "imports its sibling"),
        ("dspark_ray/scheduling/module.py", "import torch.nn", "scheduling must not import torch"),
        ("dspark_ray/simulator/module.py", "from torch import nn", "simulator must not import torch"),
        (
            "dspark_ray/core/module.py",
            "from dspark_kernels import norm",
            "core must not import dspark_kernels",
        ),
        ("dspark_ray/engine/module.py", "from ray import serve", "engine must not import ray"),
        ("dspark_ray/cli/module.py", "import ray", "cli must not import ray"),
        ("dspark_ray/engine/module.py", "import fastapi", "engine must not import fastapi"),
        ("dspark_ray/serving/module.py", "import deployments.app", "imports upwards"),
        ("kernels/dspark_kernels/module.py", "import dspark_ray.core.types", "nothing of the program"),
        ("kernels/dspark_kernels/module.py", "import ray", "dspark_kernels must not import ray"),
        ("dspark_ray/__init__.py", "from dspark_ray.core import types", "imports dspark_ray.core"),
        ("dspark_ray/__init__.py", "import torch", "imports torch"),
        ("dspark_ray/new/module.py", "", "dspark_ray/new: is not in the floors table"),
        ("dspark_ray/helpers.py", "", "dspark_ray/helpers.py: is not in the floors table"),
    ],
)
def test_a_planted_violation_is_found(tree: Path, file: str, source: str, reason: str) -> None:
    (tree / file).parent.mkdir(exist_ok=True)
    (tree / file).write_text(source, encoding="utf-8")
    violations = check_tree(tree)
    assert len(violations) == 1
    assert reason in violations[0]
