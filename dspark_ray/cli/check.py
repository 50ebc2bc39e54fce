"""`dspark-ray check CONFIG`: what would go wrong with a configuration, before anything starts."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from dspark_ray.cli.common import err, load_config, out, print_figures

_UNSOUND = 2


def check(
    config: Annotated[Path, typer.Argument(help="A Serve config, e.g. configs/smollm2-135m-cpu.yaml.")],
    device_memory_gib: Annotated[
        float | None,
        typer.Option(help="Memory of one device, instead of hardware.device_memory_gib.", metavar="GIB"),
    ] = None,
    devices_per_node: Annotated[
        int | None,
        typer.Option(help="Devices of one node, instead of hardware.devices_per_node.", metavar="N"),
    ] = None,
) -> None:
    """Judge CONFIG without loading a model: keys, shapes, memory, and what its engine cannot do.

    Nothing is fetched: shapes come from local files, the hub's cache, or those that ship with this
    program. Exit status 2 if something is wrong, with the reason and the cure of each problem.
    """
    from dspark_ray.preflight.check import check_config

    checked = load_config(config)
    given = {"device_memory_gib": device_memory_gib, "devices_per_node": devices_per_node}
    hardware = checked.hardware.model_copy(update={k: v for k, v in given.items() if v is not None})
    report = check_config(checked.model_copy(update={"hardware": hardware}))
    if report.memory is not None:
        print_figures(f"memory of one device, {checked.model.id}", report.memory.lines())
    for note in report.notes:
        err.print(f"[dim]note: {escape(note)}[/dim]", soft_wrap=True)
    for problem in report.problems:
        err.print(
            f"[bold red]{escape(problem.key)}[/bold red]: {escape(problem.reason)}\n"
            f"  [bold]→[/bold] {escape(problem.cure)}",
            soft_wrap=True,
        )
    if report.problems:
        raise typer.Exit(_UNSOUND)
    out.print(f"{escape(str(config))}: [bold green]ok[/bold green]", soft_wrap=True)
