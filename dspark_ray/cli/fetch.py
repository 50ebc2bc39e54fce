"""`dspark-ray fetch`: the target model, on disk before anything needs it."""

from typing import Annotated

import typer

from dspark_ray.cli.common import out


def fetch(
    source: Annotated[
        str,
        typer.Argument(help="'default' (SmolLM2-135M-Instruct), a local directory or a hub id owner/name."),
    ] = "default",
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every digest of the cached default model, not only sizes.")
    ] = False,
) -> None:
    """Download (and convert) a target model once; prints the directory it lies in."""
    from dspark_ray.models.fetch import resolve_model

    out.print(str(resolve_model(source, verify=verify)), soft_wrap=True)
