"""`dspark-ray calibrate`: temperatures that make a drafter's confidences mean what they say."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark_ray.cli.common import (
    ConcurrencyOption,
    ConfigOption,
    JsonOption,
    LimitOption,
    LocalEngine,
    MaxTokensOption,
    PngOption,
    PromptsOption,
    err,
    load_config,
    load_engine,
    out,
    step_progress,
    verifying_everything,
    write_json,
)
from dspark_ray.cli.evaluate import with_drafter
from dspark_ray.core.errors import ConfigError

if TYPE_CHECKING:
    from dspark_ray.core.config import AppConfig
    from dspark_ray.engine.draft_log import DraftRecord
    from dspark_ray.training.calibrate import CalibrationReport

# acceptance rule → sampling temperature; the rules are told apart by these and by shared noise
TELLING_AUROC = 0.55  # of the first position; .5 is chance
RULE_TEMPERATURES = {"greedy": 0.0, "rejection": 1.0, "shared_noise": 1.0}


def calibrate(
    config: ConfigOption,
    prompts: PromptsOption,
    drafter: Annotated[
        Path | None,
        typer.Option("--drafter", "-d", help="This checkpoint, not the configuration's.", metavar="DIR"),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Default: temperatures.json beside the drafter.", metavar="FILE.json"
        ),
    ] = None,
    max_tokens: MaxTokensOption = 256,
    concurrency: ConcurrencyOption = 32,
    limit: LimitOption = None,
    seed: Annotated[int, typer.Option(help="Of the sampled answers; prompt i takes seed + i.")] = 0,
    json: JsonOption = None,
    png: PngOption = None,
) -> None:
    """Fit a temperature and an offset a position for each acceptance rule, and save them.

    The rules are greedy, sampled, and sampled with a seed (shared noise): all prompts are answered three
    times, with every draft token verified. Prompts like those that will be served are best; the lines that
    `generate-data` writes are good. Prints the expected calibration error (ECE) of survival before and
    after, on prompts held out of that fit; --json and --png: reliability diagrams.
    """
    from dspark_ray.models.drafters.confidence import TEMPERATURES_FILE, drafter_digest
    from dspark_ray.models.fetch import with_local_drafter
    from dspark_ray.models.prompts import read_prompts, read_raw_prompts
    from dspark_ray.training.calibrate import calibrate as fit

    checked = verifying_everything(load_config(config))
    plain = with_local_drafter(checked if drafter is None else with_drafter(checked, str(drafter)))
    found = plain.speculation.drafter
    if found.kind != "dspark" or found.path is None:
        raise ConfigError(
            f"{drafter or config} has no DSpark drafter: other drafters learn their confidences as they go"
        )
    checkpoint = Path(found.path)
    read_raw_prompts(prompts, limit)  # a file that is wrong is said before the model is loaded
    with tempfile.TemporaryDirectory() as folder:
        local = load_engine(_uncalibrated(plain, checkpoint, Path(folder)), profiled=False)
    token_ids = [item.token_ids for item in read_prompts(prompts, local.tokenizer, limit)]
    records = {
        rule: _collect(local, token_ids, rule, max_tokens, concurrency, seed) for rule in RULE_TEMPERATURES
    }
    made_from: dict[str, object] = {"drafter": drafter_digest(checkpoint), "prompts": len(token_ids)}
    temperatures, reports = fit(records, made_from)
    path = to or checkpoint / TEMPERATURES_FILE
    temperatures.save(path)
    for report in reports:
        _print(report)
    err.print(f"written to {path}", soft_wrap=True)
    if weak := [report.rule for report in reports if not report.after[0].auroc >= TELLING_AUROC]:
        err.print(
            f"[yellow]The confidences say next to nothing ({', '.join(weak)}): train longer, or the head "
            "alone on fresh texts (`trainable: confidence`).[/yellow]",
            soft_wrap=True,
        )
    if json is not None:
        write_json(json, {"made_from": made_from, "rules": [report.as_json() for report in reports]})
    if png is not None:
        from dspark_ray.training.plots import plot_reliability

        plot_reliability(reports, png)
        err.print(f"written to {png}", soft_wrap=True)


def _uncalibrated(config: "AppConfig", checkpoint: Path, folder: Path) -> "AppConfig":
    """Whole blocks, all verified, with T = 1: temperatures beside the drafter may be another one's."""
    from dspark_ray.calibration.temperatures import Temperatures
    from dspark_ray.models.drafters.checkpoint import load_checkpoint
    from dspark_ray.models.drafters.confidence import drafter_digest

    block_size = load_checkpoint(checkpoint)[0].block_size
    made_from = {"drafter": drafter_digest(checkpoint)}
    Temperatures(Temperatures.neutral(block_size).by_rule, made_from).save(folder / "neutral.json")
    updates = {
        "temperatures": str(folder / "neutral.json"),
        "num_draft_tokens": block_size,
    }
    return config.model_copy(update={"speculation": config.speculation.model_copy(update=updates)})


def _collect(
    local: LocalEngine,
    prompts: list[tuple[int, ...]],
    rule: str,
    max_tokens: int,
    concurrency: int,
    seed: int,
) -> "list[DraftRecord]":
    """The drafts of one rule, verified in full."""
    from dspark_ray.core.types import SamplingParams
    from dspark_ray.training.evaluate import evaluate

    sampling = SamplingParams(
        temperature=RULE_TEMPERATURES[rule],
        max_tokens=max_tokens,
        seed=seed,
        shared_noise=rule == "shared_noise",
    )
    assert sampling.rule == rule, "outcomes of one rule calibrate that rule"
    with step_progress(f"answering ({rule})", len(prompts)) as on_step:
        result = evaluate(local.engine, prompts, sampling, concurrency=concurrency, on_step=on_step)
    err.print(f"{rule}: {len(result.records)} drafts, τ {result.tau:.3f}")
    return result.records


def _print(report: "CalibrationReport") -> None:
    from rich.table import Table

    title = f"{report.rule}, {report.num_drafts} drafts"
    columns = ("position", "temperature", "offset", "ECE before", "after", "AUROC before", "after", "Brier")
    table = Table(*columns, title=title, show_footer=True)
    scaling = report.scaling
    rows = zip(scaling.temperatures, scaling.offsets, report.before, report.after, strict=True)
    for position, (temperature, offset, before, after) in enumerate(rows, start=1):
        figures = (before.ece, after.ece, before.auroc, after.auroc, after.brier)
        fitted = (f"{temperature:.3f}", f"{offset:+.3f}")
        table.add_row(str(position), *fitted, *(f"{figure:.4f}" for figure in figures))
    ece_before, ece_after = (f"{value:.4f}" for value in report.mean_ece)
    for column, footer in zip(
        table.columns,
        ("mean", "", "", ece_before, ece_after, "moves ≤", f"{report.auroc_move:.4f}", ""),
        strict=True,
    ):
        column.footer = footer
    out.print(table)
