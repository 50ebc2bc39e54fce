"""`dspark-ray bench`: modes side by side in this process, or load on a running server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark_ray.cli.common import (
    JsonOption,
    LimitOption,
    MaxTokensOption,
    PromptsOption,
    err,
    load_config,
    on_this_machine,
    out,
    prepare_torch,
    start_ranks,
    write_json,
)
from dspark_ray.core.errors import ConfigError

if TYPE_CHECKING:
    from dspark_ray.engine.measure import TimedRun

_HEADERS = {
    "concurrency": "in flight",
    "rounds": "n",
    "tokens_per_s": "tok/s",
    "decode_tokens_per_s": "decode",
    "ratio_to_off": "× off",
    "tau": "τ",
    "mean_budget_tokens": "budget",
    "trimmed_share": "trim",
    "distinct_4grams": "4-gr.",
    "same_text_share": "same",
}


def bench(
    prompts: PromptsOption,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="Compare its modes in this process.", metavar="FILE.yaml"),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Drive this server instead, e.g. http://127.0.0.1:8000.", metavar="URL")
    ] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests in flight; repeatable. Default: 1, 8.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of the comparison; medians are told.")] = 3,
    variants: Annotated[str | None, typer.Option(help="Of the comparison, by commas; see above.")] = None,
    max_tokens: MaxTokensOption = 128,
    limit: LimitOption = 16,
    json: JsonOption = None,
) -> None:
    """Compare ways of decoding (--config), or measure what a server's clients see (--url).

    Variants: off, fixed (all γ), fixed-1 to fixed-7, adaptive, algorithm1, threshold with the config's
    drafter; ngram (adaptive) and ngram-fixed with prompt look-up. Default:
    off,fixed,adaptive,algorithm1,ngram.
    """
    if (config is None) == (url is None):
        raise ConfigError("give --config to compare modes in this process, or --url of a running server")
    levels = concurrency or [1, 8]
    if url is not None:
        result = _drive(url, prompts, levels, max_tokens, limit)
    else:
        assert config is not None
        result = _compare(config, prompts, levels, rounds, variants, max_tokens, limit)
    if json is not None:
        write_json(json, result)


def print_rows(rows: list[dict[str, Any]], title: str | None = None) -> None:
    """Rows with the same keys as a table."""
    from rich.table import Table

    table = Table(*(_HEADERS.get(name, name.replace("_", " ")) for name in rows[0]), title=title)
    for row in rows:
        table.add_row(*(_as_text(value) for value in row.values()))
    out.print(table)


def print_run(name: str, concurrency: int, number: int, run: "TimedRun") -> None:
    """A line for each run as it ends: a comparison takes minutes."""
    err.print(
        f"round {number + 1}, {concurrency} requests, {name}: {run.tokens_per_s:.1f} tokens/s, "
        f"τ {run.counters.tau:.3f}"
    )


def _drive(url: str, prompts: Path, levels: list[int], max_tokens: int, limit: int | None) -> dict[str, Any]:
    from dspark_ray.models.prompts import read_raw_prompts
    from dspark_ray.profiling.load import drive, find_model

    base = url.rstrip("/").removesuffix("/v1")
    model, items = find_model(base), read_raw_prompts(prompts, limit)
    rows: list[dict[str, Any]] = []
    for level in levels:
        with err.status(f"{len(items)} requests to {model}, {level} at a time"):
            report = drive(base, model, items, concurrency=level, max_tokens=max_tokens)
        rows.append(report.figures())
        for reason in sorted({timing.error for timing in report.timings if timing.error}):
            err.print(f"failed: {reason}", markup=False)
    print_rows(rows, f"{model} at {base}")
    return {"url": base, "model": model, "max_tokens": max_tokens, "levels": rows}


def _compare(
    config: Path,
    prompts: Path,
    levels: list[int],
    rounds: int,
    variants: str | None,
    max_tokens: int,
    limit: int | None,
) -> dict[str, Any]:
    from dspark_ray.models.prompts import read_prompts, read_raw_prompts

    checked = load_config(config)
    read_raw_prompts(prompts, limit)  # a file that is wrong is said before the model is loaded
    prepare_torch(checked)
    from dspark_ray.models.fetch import resolve_model, with_local_drafter
    from dspark_ray.models.tokenizer import Tokenizer
    from dspark_ray.profiling.compare import DEFAULT_VARIANTS, run_comparison

    checked = on_this_machine(with_local_drafter(checked))
    model_dir = resolve_model(checked.model.source)
    items = read_prompts(prompts, Tokenizer.load(model_dir), limit)
    ranks = start_ranks(checked, model_dir)
    result = run_comparison(
        checked,
        model_dir,
        [item.token_ids for item in items],
        names=[name.strip() for name in variants.split(",")] if variants else DEFAULT_VARIANTS,
        concurrencies=levels,
        rounds=rounds,
        max_tokens=max_tokens,
        on_run=print_run,
        load=None if ranks is None else ranks.load,
    )
    print_rows(result["medians"])
    return result


def _as_text(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
