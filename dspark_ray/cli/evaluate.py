"""`dspark-ray evaluate`: how well drafters draft on given prompts, side by side."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark_ray.cli.common import (
    ConcurrencyOption,
    ConfigOption,
    JsonOption,
    LimitOption,
    LocalEngine,
    MaxTokensOption,
    PngOption,
    err,
    load_config,
    load_engine,
    out,
    print_figures,
    step_progress,
    verifying_above,
    verifying_everything,
    write_json,
)
from dspark_ray.core.errors import ConfigError

if TYPE_CHECKING:
    from dspark_ray.core.config import AppConfig


def evaluate(
    config: ConfigOption,
    prompts: Annotated[
        list[Path],
        typer.Option("--prompts", "-p", help="JSON lines; may be repeated.", metavar="FILE.jsonl"),
    ],
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            "-d",
            help="A checkpoint directory, or `ngram`, instead of the config's; may be repeated.",
            metavar="DIR",
        ),
    ] = None,
    max_tokens: MaxTokensOption = 256,
    concurrency: ConcurrencyOption = 8,
    temperature: Annotated[
        list[float] | None,
        typer.Option(min=0.0, max=2.0, help="0 (the default) is greedy; may be repeated.", metavar="T"),
    ] = None,
    threshold: Annotated[
        list[float] | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Verify only tokens whose survival is at least A; may be repeated. 0: all (the default).",
            metavar="A",
        ),
    ] = None,
    limit: LimitOption = None,
    seed: Annotated[int, typer.Option(help="Of the sampling; prompt i takes seed + i.")] = 0,
    json: JsonOption = None,
    png: PngOption = None,
) -> None:
    """Accepted length τ and acceptance by position of drafters, every draft token verified.

    Position k counts where all before it were accepted. Texts end by themselves or at --max-tokens. With
    several --threshold, the share of verified tokens that stand, and τ, by threshold.
    """
    from dspark_ray.models.prompts import read_raw_prompts

    checked = verifying_everything(load_config(config))
    for path in prompts:
        read_raw_prompts(path, limit)  # a file that is wrong is said before a model is loaded
    configs = [(name, with_drafter(checked, name)) for name in drafter or ()] or [("", checked)]
    rows = []
    thresholds: list[float | None] = [*threshold] if threshold else [None]
    for (name, chosen), least in product(configs, thresholds):
        local = load_engine(chosen if least is None else verifying_above(chosen, least), profiled=False)
        label = Path(name).name or chosen.speculation.drafter.kind
        above = "" if least is None else f", survival ≥ {least:g}"
        settings = {"max_tokens": max_tokens, "seed": seed}
        for row in _runs(local, prompts, temperature or [0.0], concurrency, limit, settings):
            rows.append({"drafter": label, "threshold": least, **row})
            print_figures(f"{label} on {row['prompts']}, T = {row['temperature']:g}{above}", row["report"])
        local.close()
    if len(rows) > 1:
        _print_side_by_side(rows)
    if json is not None:
        content = {"rows": rows, "max_tokens": max_tokens, "config": checked.model_dump(mode="json")}
        write_json(json, content)
    if png is not None:
        from dspark_ray.training.plots import plot_acceptance, plot_thresholds

        (plot_thresholds if threshold else plot_acceptance)(rows, png)
        err.print(f"written to {png}", soft_wrap=True)


def with_drafter(config: "AppConfig", name: str) -> "AppConfig":
    """`config` with another drafter: a checkpoint directory, whose kind its tensors tell, or `ngram`.

    Whole blocks are drafted, as many tokens as the checkpoint was made for. Raises `ConfigError`.
    """
    from dspark_ray.core.config import DrafterConfig
    from dspark_ray.models.drafters.checkpoint import load_checkpoint

    updates: dict[str, Any] = {"temperatures": None, "step_table": None}
    if name == "ngram":
        updates["drafter"] = config.speculation.drafter.model_copy(update={"kind": "ngram", "path": None})
    else:
        path = Path(name).resolve()
        if not path.is_dir():
            raise ConfigError(f"--drafter: {name!r} is no directory, nor `ngram`")
        found = load_checkpoint(path)[0]
        updates |= {
            "drafter": DrafterConfig(kind=found.kind, path=str(path)),
            "num_draft_tokens": found.block_size,
        }
    return config.model_copy(update={"speculation": config.speculation.model_copy(update=updates)})


def _runs(
    local: LocalEngine,
    prompts: list[Path],
    temperatures: list[float],
    concurrency: int,
    limit: int | None,
    settings: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """A row for each file and temperature."""
    from dspark_ray.core.types import SamplingParams
    from dspark_ray.engine.measure import warm_up
    from dspark_ray.models.prompts import read_prompts
    from dspark_ray.training.evaluate import evaluate as run

    for path in prompts:
        items = read_prompts(path, local.tokenizer, limit)
        warm_up(local.engine, items[0].token_ids[:32])
        for temperature in temperatures:
            sampling = SamplingParams(temperature=temperature, shared_noise=False, **settings)
            with step_progress(f"evaluating on {path.name}", len(items)) as on_step:
                token_ids = [item.token_ids for item in items]
                result = run(local.engine, token_ids, sampling, concurrency=concurrency, on_step=on_step)
            yield {"prompts": path.stem, "temperature": temperature, "report": result.report()}


def _print_side_by_side(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    by_threshold = any(row["threshold"] is not None for row in rows)
    more = ("survival ≥", "of verified, stand") if by_threshold else ()
    table = Table(
        "drafter", "prompts", "T", *more, "τ", "acceptance by position", "distinct 4-grams", "tokens/s"
    )
    for row in rows:
        report = row["report"]
        by_position = " ".join("–" if v is None else f"{v:.2f}" for v in report["conditional_acceptance"])
        chosen = (f"{row['threshold']:g}", _share(report["accepted_share"])) if by_threshold else ()
        table.add_row(
            *(row["drafter"], row["prompts"], f"{row['temperature']:g}", *chosen),
            f"{report['tau']:.3f}",
            by_position,
            f"{report['distinct_4grams']:.3f}",
            f"{report['tokens_per_s']:.1f}",
        )
    out.print(table)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
