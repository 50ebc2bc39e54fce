"""What the commands share: consoles, options, the configuration file, and an engine in this process."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from dspark_ray.core.errors import ConfigError
from dspark_ray.observability.progress import progress

if TYPE_CHECKING:
    from dspark_ray.core.config import AppConfig
    from dspark_ray.core.types import RequestOutput
    from dspark_ray.engine.engine import Engine
    from dspark_ray.engine.offline import OnStep
    from dspark_ray.models.tokenizer import Tokenizer
    from dspark_ray.runtime.local_ranks import LocalRanks

# Results. Tables in a file or a pipe are not squeezed into the width of a terminal that is not there.
out = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
err = Console(stderr=True, highlight=False)  # progress, warnings, errors

PROJECT_DIR = Path(__file__).resolve().parents[2]
MODES = ("off", "fixed", "threshold", "algorithm1", "adaptive")

PROMPT_SHAPES = "JSON lines with prompt, messages, turns or prompt_ids."

ConfigOption = Annotated[
    Path, typer.Option("--config", "-c", help="The YAML that `serve` takes.", metavar="FILE.yaml")
]
PromptsOption = Annotated[Path, typer.Option("--prompts", "-p", help=PROMPT_SHAPES, metavar="FILE.jsonl")]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Only the first N prompts.", metavar="N")]
ModeOption = Annotated[
    str | None,
    typer.Option(help=f"Verification mode instead of the config's: {', '.join(MODES)}.", metavar="MODE"),
]
MaxTokensOption = Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.", metavar="N")]
ConcurrencyOption = Annotated[int, typer.Option(min=1, help="Requests in flight.", metavar="N")]
TemperatureOption = Annotated[
    float, typer.Option(min=0.0, max=2.0, help="0 is greedy: the same text every time.", metavar="T")
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Write everything to this file.", metavar="FILE.json")
]
PngOption = Annotated[
    Path | None, typer.Option("--png", help="Draw it into this file (needs matplotlib).", metavar="FILE.png")
]


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """An engine in this process, and what turns text into its tokens."""

    config: "AppConfig"
    engine: "Engine"
    tokenizer: "Tokenizer"
    close: Callable[[], None] = lambda: None  # ends its other ranks; so does the end of this process


def print_error(message: str) -> None:
    """One red line on stderr (more only if the message has more)."""
    err.print(f"[bold red]error:[/bold red] {escape(message)}", soft_wrap=True)


def load_config(path: Path, **speculation: Any) -> "AppConfig":
    """The application's configuration with its files made absolute; `ConfigError` says what is wrong.

    A relative path in it counts from the working directory, or else from the project. `speculation`
    replaces keys of that section; None leaves them.
    """
    from dspark_ray.core.config import load_app_config, parse_app_config, with_absolute_paths

    config = load_app_config(path)
    changes = {key: value for key, value in speculation.items() if value is not None}
    if changes:
        args = config.model_dump()
        config = parse_app_config({**args, "speculation": {**args["speculation"], **changes}})
    return with_absolute_paths(config, (Path.cwd(), PROJECT_DIR))


def verifying_everything(config: "AppConfig") -> "AppConfig":
    """`config` with mode fixed and all γ tokens: what a drafter is judged under."""
    from dspark_ray.core.types import VerificationMode

    return _with_speculation(config, mode=VerificationMode.FIXED, fixed_tokens=None)


def verifying_above(config: "AppConfig", threshold: float) -> "AppConfig":
    """`config` with mode threshold: only tokens whose survival is at least `threshold` are verified."""
    from dspark_ray.core.types import VerificationMode

    return _with_speculation(config, mode=VerificationMode.THRESHOLD, threshold=threshold)


def _with_speculation(config: "AppConfig", **updates: Any) -> "AppConfig":
    return config.model_copy(update={"speculation": config.speculation.model_copy(update=updates)})


def prepare_torch(config: "AppConfig") -> None:
    """Gives torch the configured number of threads, or all cores, shared by ranks.

    `ConfigError` for a configuration whose engine does not run in this process.
    """
    if config.engine.kind != "native":
        raise ConfigError(
            f"this command runs the native engine and engine.kind is {config.engine.kind!r}: start it with "
            "`dspark-ray serve` and use --url, or set engine.kind to native"
        )
    with _status("loading torch"):
        import torch
    cores = max(1, _available_cores() // config.engine.tensor_parallel_size)
    torch.set_num_threads(config.engine.num_threads or cores)


def on_this_machine(config: "AppConfig") -> "AppConfig":
    """`config` as commands run it, whose ranks are processes of one machine."""
    engine = config.engine.model_copy(update={"rank_placement": "STRICT_PACK"})
    return config.model_copy(update={"engine": engine})


def start_ranks(config: "AppConfig", model_dir: Path) -> "LocalRanks | None":
    """The other ranks, where there are any."""
    count = config.engine.tensor_parallel_size
    if count == 1:
        return None
    from dspark_ray.runtime.local_ranks import LocalRanks

    err.print(f"{count} ranks on this machine", soft_wrap=True)
    return LocalRanks(config, model_dir)


def load_engine(config: "AppConfig", *, profiled: bool = True) -> LocalEngine:
    """Fetches, loads and profiles what `config` names, with a line on stderr for what takes long.

    Without `profiled` no step costs are known: enough where every draft token is verified.
    """
    prepare_torch(config)
    from dspark_ray.engine.build import build_engine
    from dspark_ray.models.fetch import resolve_model, with_local_drafter
    from dspark_ray.models.tokenizer import Tokenizer
    from dspark_ray.profiling.cache import build_profiled_engine

    model_dir = resolve_model(config.model.source)
    err.print(f"loading {config.model.id} from {model_dir}", soft_wrap=True)
    config = on_this_machine(with_local_drafter(config))
    build = build_profiled_engine if profiled else build_engine
    ranks = start_ranks(config, model_dir)
    engine = build(config, model_dir=model_dir, load=None if ranks is None else ranks.load)
    for what, text in engine.describe().items():
        err.print(f"  [dim]{what}: {escape(str(text))}[/dim]", soft_wrap=True)
    tokenizer = Tokenizer.load(model_dir)
    return LocalEngine(config, engine, tokenizer, (lambda: None) if ranks is None else ranks.close)


@contextmanager
def step_progress(title: str, num_requests: int) -> Iterator["OnStep"]:
    """How many requests have finished, with the tokens so far; the callback goes to `generate_all`."""
    with progress(title, err) as tell:
        num_ended = num_tokens = 0

        def on_step(outputs: "list[RequestOutput]") -> None:
            nonlocal num_ended, num_tokens
            num_tokens += sum(len(output.token_ids) for output in outputs)
            num_ended += sum(output.finish_reason is not None for output in outputs)
            note = f"{num_ended} of {num_requests} answers, {num_tokens:,} tokens"
            tell(num_ended / max(1, num_requests), note)

        yield on_step


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Results to a file; `ConfigError` if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    err.print(f"written to {path}", soft_wrap=True)


def print_figures(title: str, figures: dict[str, Any]) -> None:
    """A small table of names and values."""
    from rich.table import Table

    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in figures.items():
        table.add_row(name, _as_text(value))
    out.print(table)


@contextmanager
def _status(text: str) -> Iterator[None]:
    if err.is_terminal:
        with err.status(text):
            yield
    else:
        yield


def _as_text(value: Any) -> str:
    if isinstance(value, list):
        return "  ".join(_as_text(item) for item in value)
    if value is None:
        return "–"
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
