"""What the documents tell people to type and open exists; the toy runs."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from dspark_ray.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
PATH = re.compile(
    r"\b(?:configs|cluster|benchmarks|models|docs|tests|dspark_ray|deployments|kernels)/[\w./-]*\w"
)
COMMAND = re.compile(r"(?:^|`|\s)dspark-ray ([a-z-]+)([^`\n|#]*)", re.MULTILINE)
GENERATED = ("benchmarks/results/NAME",)


def commands() -> dict[str, Any]:
    """Each command of the command line by name."""
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_commands_and_their_options_exist(page: Path) -> None:
    known = commands()
    for name, rest in COMMAND.findall(page.read_text()):
        assert name in known, f"dspark-ray {name}"
        options = {option for parameter in known[name].params for option in parameter.opts} | {"--help"}
        options |= {option for parameter in known[name].params for option in parameter.secondary_opts}
        for word in shlex.split(rest.replace("'", "")):
            if re.fullmatch(r"--?[a-z][a-z-]*", word):
                assert word in options, f"dspark-ray {name} {word}"


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_files_exist(page: Path) -> None:
    for path in PATH.findall(page.read_text()):
        if not path.startswith(GENERATED) and "my-model" not in path:
            # The page on the architecture counts from the program's folder.
            assert (ROOT / path).exists() or (ROOT / "dspark_ray" / path).exists(), path


def test_the_tests_that_are_named_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / "faults.md").read_text())
    assert len(named) > 40
    for path, function in named:
        text = (ROOT / path).read_text()
        assert f"def {function}(" in text or not function, f"{path}::{function}"


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"(?:^ *|`)make ([a-z-]+)", page.read_text(), re.MULTILINE):
        assert target in targets, f"make {target}"


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_the_sites_pages_exist() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def files(node: object) -> set[str]:
        if isinstance(node, str):
            return {node}
        items = node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
        return set().union(*(files(item) for item in items))

    pages = files(config["nav"])
    assert "index.md" in pages
    assert pages <= {page.name for page in PAGES if page.parent.name == "docs"}


def test_the_toy_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "toy.md").read_text(), re.DOTALL)
    exec(compile(source, "docs/toy.md", "exec"), {})
    assert "without speculation" in capsys.readouterr().out
