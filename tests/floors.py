"""The floors of the program, and a checker that reads every import of a source tree against them.

Imports go down only; packages on one floor never import each other; some third parties are kept to some
packages. The table is the one of docs/architecture.md: a new package is added there and here.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROGRAM = "dspark_ray"
KERNELS = "dspark_kernels"
DEPLOYMENTS = "deployments"

# Package → floor. Inside the program unless it is one of the two top-level ones above.
FLOORS = {
    "core": 0,
    "scheduling": 1,
    "calibration": 1,
    "observability": 1,
    "simulator": 2,
    "models": 2,
    "engine": 3,
    "training": 4,
    "profiling": 4,
    "vllm_engine": 4,
    "preflight": 5,
    "runtime": 5,
    "serving": 6,
    DEPLOYMENTS: 7,
    "cli": 8,
}
NO_TORCH = {"core", "scheduling", "calibration", "observability", "simulator"}

_WITH_TORCH = (set(FLOORS) - NO_TORCH) | {KERNELS}
# Third party → packages that may import it. Anything not listed here is free.
ALLOWED_IN = {
    "torch": _WITH_TORCH,
    "triton": {KERNELS},
    "flash_attn": {KERNELS},
    "flash_attn_interface": {KERNELS},
    "flashinfer": {KERNELS},
    "safetensors": _WITH_TORCH,
    "transformers": _WITH_TORCH,
    "tokenizers": _WITH_TORCH,
    "xgrammar": {"models", "engine"},
    KERNELS: _WITH_TORCH,
    "ray": {"runtime", DEPLOYMENTS},
    "vllm": {"vllm_engine"},
    "fastapi": {"serving", DEPLOYMENTS, "cli"},
    "starlette": {"serving", DEPLOYMENTS, "cli"},
    "uvicorn": {"serving", DEPLOYMENTS, "cli"},
    "typer": {"cli"},
}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module: `module` is absolute, e.g. `dspark_ray.engine.engine`."""

    path: Path
    line: int
    module: str


def check_tree(root: Path) -> list[str]:
    """Every violation under `root` as `file:line: what`; empty when all is well."""
    violations = [f"{path}: is not in the floors table" for path in _unknown_packages(root)]
    for owner, package_dir in _packages(root):
        for path in sorted(package_dir.rglob("*.py")):
            for imported in _imports(path, root):
                if reason := _violation(owner, imported.module):
                    relative = imported.path.relative_to(root)
                    violations.append(f"{relative}:{imported.line}: {reason}")
    for imported in _imports(root / PROGRAM / "__init__.py", root):
        if imported.module.split(".")[0] in (PROGRAM, DEPLOYMENTS, *ALLOWED_IN):
            violations.append(f"{PROGRAM}/__init__.py:{imported.line}: imports {imported.module}")
    return violations


def _unknown_packages(root: Path) -> list[Path]:
    """Packages and modules directly in the program that have no floor."""
    entries = sorted((root / PROGRAM).iterdir())
    names = {entry: entry.stem for entry in entries if entry.suffix == ".py" or any(entry.glob("*.py"))}
    inside = FLOORS.keys() - {DEPLOYMENTS}
    return [entry.relative_to(root) for entry, name in names.items() if name not in {*inside, "__init__"}]


def _packages(root: Path) -> Iterator[tuple[str, Path]]:
    """Each package's name in the table, and its folder."""
    for name in FLOORS:
        yield name, root / DEPLOYMENTS if name == DEPLOYMENTS else root / PROGRAM / name
    yield KERNELS, root / "kernels" / KERNELS


def _imports(path: Path, root: Path) -> Iterator[Import]:
    """Imports anywhere in a file: inside functions and under TYPE_CHECKING too."""
    if not path.is_file():
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, path, root)
            # `from dspark_ray import engine` names a package in its second half.
            for alias in node.names:
                yield Import(path, node.lineno, f"{base}.{alias.name}")


def _absolute(node: ast.ImportFrom, path: Path, root: Path) -> str:
    if node.level == 0:
        return node.module or ""
    parts = list(path.relative_to(root).parts)
    if parts[0] == "kernels":
        parts = parts[1:]
    package = parts[: len(parts) - node.level]
    return ".".join([*package, node.module] if node.module else package)


def _violation(owner: str, module: str) -> str | None:
    """Why the package `owner` must not import `module`; None when it may."""
    top, _, rest = module.partition(".")
    if top in ALLOWED_IN and owner != top and owner not in ALLOWED_IN[top]:
        return f"{owner} must not import {top}"
    if top not in (PROGRAM, DEPLOYMENTS):
        return None
    target = DEPLOYMENTS if top == DEPLOYMENTS else rest.split(".")[0]
    if owner == KERNELS:
        return f"{KERNELS} must import nothing of the program, not {module}"
    if target == owner or target not in FLOORS:  # not a package: a name in dspark_ray/__init__.py
        return None
    if FLOORS[target] > FLOORS[owner]:
        return f"{owner} (floor {FLOORS[owner]}) imports upwards: {target} (floor {FLOORS[target]})"
    if FLOORS[target] == FLOORS[owner]:
        return f"{owner} imports its sibling {target} (floor {FLOORS[owner]})"
    return None
