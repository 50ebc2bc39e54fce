"""`dspark-ray profile`: measures the step table that adaptive verification decides by."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark_ray.cli.common import (
    ConfigOption,
    err,
    load_config,
    load_engine,
    on_this_machine,
    out,
    prepare_torch,
)
from dspark_ray.core.errors import ConfigError

if TYPE_CHECKING:
    from dspark_ray.scheduling.step_table import StepTable


def profile(
    config: ConfigOption,
    to: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Also write the table here (speculation.step_table).", metavar="FILE.json"
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure even if a table is cached.")] = False,
) -> None:
    """Measure what a step costs on this machine, by size; later starts read it from the cache.

    Do it on an idle machine, with the threads that will serve: the scheduler believes this table.
    """
    checked = on_this_machine(load_config(config))
    if checked.speculation.mode.value == "off":
        raise ConfigError(f"{config} has mode off, which looks at no table; choose another mode")
    if checked.speculation.step_table is not None:
        raise ConfigError(f"{config} names its own step table; remove speculation.step_table to measure one")
    prepare_torch(checked)
    from dspark_ray.models.fetch import resolve_model
    from dspark_ray.profiling.cache import table_path
    from dspark_ray.profiling.identity import table_identity

    cached = table_path(table_identity(checked, resolve_model(checked.model.source)))
    if again:
        cached.unlink(missing_ok=True)
    table = load_engine(checked).engine.budget.table
    assert table is not None
    _print(table)
    err.print(f"cached in {cached}", soft_wrap=True)
    if to is not None:
        table.save(to)
        err.print(f"written to {to}", soft_wrap=True)


def _print(table: "StepTable") -> None:
    from rich.table import Table

    verify = Table("rows", "ms", "µs a row", title="target step")
    for rows, ms in zip(table.rows.tolist(), table.verify_ms.tolist(), strict=True):
        verify.add_row(str(rows), f"{ms:.2f}", f"{1e3 * ms / rows:.0f}")
    draft = Table("requests", "ms", title="drafting")
    for requests, ms in zip(table.requests.tolist(), table.draft_ms.tolist(), strict=True):
        draft.add_row(str(requests), f"{ms:.2f}")
    out.print(verify)
    out.print(draft)
    out.print(f"and {1e3 * table.context_ms_per_token:.3f} µs for each cached token of context")
    out.print(table.summary(), soft_wrap=True)
