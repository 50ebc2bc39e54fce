"""What the documents tell people to type and open exists, and its arguments parse; the toy runs.

A command of the program or of a benchmark is read by its own parser: options, values and the number of
arguments. Nothing is carried out here; the files that commands name are looked for apart. How tests run the
commands of code blocks, or why they do not, stands in `tests/documented.py`, which must know each of them.
"""

import argparse
import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from dspark_ray.cli.main import app
from dspark_ray.core.config import parse_app_config
from tests.documented import TABLE, Elsewhere, Run, Serves, filled
from tests.documents import PAGES, ROOT, all_commands, blocks

PATH = re.compile(
    r"\b(?:configs|cluster|benchmarks|models|docs|tests|dspark_ray|deployments|kernels)/[\w./-]*\w"
)
COMMAND = re.compile(r"(?:^|`|\s)dspark-ray ([a-z-]+)([^`\n|#]*)", re.MULTILINE)
TYPED = re.compile(
    r"^ *dspark-ray ([a-z-]+)([^`\n#]*)", re.MULTILINE
)  # a line of its own: all of it is there
SHELL = re.compile(r"\s(?:\||>>?|&&)\s")
SCRIPT = re.compile(r"(?:^|`|\s|\d )(?:[\w./-]*/)?python (benchmarks/[\w/]+\.py)([^`\n|#>]*)", re.MULTILINE)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
GENERATED = ("benchmarks/results/NAME",)


def commands() -> dict[str, Any]:
    """Each command of the command line by name."""
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def text_of(page: Path) -> str:
    """With commands over several lines put into one."""
    return re.sub(r"\\\n\s*", "", page.read_text())


def script_calls() -> list[tuple[str, str]]:
    """Each call of a benchmark in any document, and as tests run it with less: script, arguments."""
    with_less = [filled(line, how.less, {}) for line, how in TABLE.items() if isinstance(how, Run)]
    texts = [*map(text_of, PAGES), *with_less]
    return sorted({(script, rest.strip()) for text in texts for script, rest in SCRIPT.findall(text)})


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_commands_parse(page: Path) -> None:
    known = commands()
    for name, rest in COMMAND.findall(text_of(page)):
        assert name in known, f"dspark-ray {name}"
        options = {option for one in known[name].params for option in (*one.opts, *one.secondary_opts)}
        for word in shlex.split(rest.replace("'", "")):
            if re.fullmatch(r"--?[a-z][a-z-]*", word):
                assert word in options | {"--help"}, f"dspark-ray {name} {word}"
    for name, rest in TYPED.findall(text_of(page)):
        command, words = known[name], shlex.split(SHELL.split(rest)[0])
        context = command.context_class(command, info_name=name)
        values, positional, _ = command.make_parser(context).parse_args(args=words)
        missing = [one.name for one in command.params if one.required and values.get(one.name) is None]
        assert not missing or "help" in values, f"dspark-ray {name} {rest}: without {missing}"
        assert not positional, f"dspark-ray {name} {rest}: {positional} is too much"


class Parsed(Exception):
    """A script's arguments were right; it must not go on."""


@pytest.mark.parametrize(("script", "rest"), script_calls())
def test_benchmarks_take_their_arguments(script: str, rest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def only_parse(parser: argparse.ArgumentParser, *arguments: Any) -> None:
        if parser.prog == Path(script).name:
            parse(parser, *arguments)
            raise Parsed

    words = shlex.split(SHELL.split(rest)[0])
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
    monkeypatch.setattr(sys, "argv", [script, *words])
    monkeypatch.syspath_prepend(str((ROOT / script).parent))
    before = set(sys.modules)
    try:
        with pytest.raises((Parsed, SystemExit)) as ended:
            runpy.run_path(str(ROOT / script), run_name="__main__")
    finally:
        for name in set(sys.modules) - before:  # folders have modules of one name
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(ROOT / "benchmarks")):
                del sys.modules[name]
    assert ended.type is Parsed or ("--help" in words and ended.value.code == 0), f"{script} {rest}"


def test_every_command_has_a_row_in_the_table() -> None:
    found = all_commands()
    unknown = [f"{where}: {command}" for command, where in found.items() if command not in TABLE]
    assert not unknown, "say in tests/documented.py how a test runs them:\n" + "\n".join(unknown)
    gone = [command for command in TABLE if command not in found]
    assert not gone, "no document has these any more:\n" + "\n".join(gone)


@pytest.mark.parametrize("command", TABLE)
def test_rows_of_the_table_are_sound(command: str) -> None:
    how = TABLE[command]
    if isinstance(how, Elsewhere):
        assert (ROOT / how.by).is_file()
    if isinstance(how, Run | Serves):
        filled(command, how.less, {})  # what is replaced stands there


def test_blocks_of_code_say_their_language() -> None:
    known = {"sh", "text", "python", "yaml", "json", "nginx"}
    for page in PAGES:
        for block in blocks(page):
            assert block.language in known, f"{block.page}:{block.line}: ```{block.language}"


def test_parts_of_a_configuration_are_valid() -> None:
    shown = [block for page in PAGES for block in blocks(page) if block.language == "yaml"]
    assert len(shown) > 5
    for block in shown:
        parse_app_config(yaml.safe_load(block.text))


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_blocks_of_code_are_what_they_say(page: Path) -> None:
    for language, block in BLOCK.findall(page.read_text()):
        if language == "yaml":
            yaml.safe_load(block)
        elif language == "json":
            json.loads(block)
        elif language == "python":
            compile(block, str(page), "exec")


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
