"""What the commands share: consoles, the configuration file, and the options that many of them take."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from dspark_ray.core.config import AppConfig

out = Console(highlight=False)  # results
err = Console(stderr=True, highlight=False)  # progress, warnings, errors

PROJECT_DIR = Path(__file__).resolve().parents[2]

ConfigFile = Annotated[
    Path,
    typer.Option("--config", "-c", help="The YAML that `serve` takes.", exists=True, dir_okay=False),
]


def print_error(message: str) -> None:
    """One red line on stderr (more only if the message has more)."""
    err.print(f"[bold red]error:[/bold red] {escape(message)}", soft_wrap=True)


def load_config(path: Path) -> "AppConfig":
    """The application's configuration with its files made absolute; `ConfigError` says what is wrong.

    A relative path in it counts from the working directory, or else from the project.
    """
    from dspark_ray.core.config import load_app_config, with_absolute_paths

    return with_absolute_paths(load_app_config(path), (Path.cwd(), PROJECT_DIR))
