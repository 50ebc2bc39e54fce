"""`dspark-ray plan`: how many replicas, and which policy, for a traffic and an SLO."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark_ray.cli.common import JsonOption, err, out, write_json
from dspark_ray.cli.simulate import ScenarioArgument, changed
from dspark_ray.core.errors import ConfigError
from dspark_ray.observability.progress import progress

if TYPE_CHECKING:
    from dspark_ray.simulator.planner import Answer, Curve
    from dspark_ray.simulator.scenario import Scenario


def plan(
    scenario: ScenarioArgument,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests per second.", metavar="PER_S")
    ] = None,
    tpot: Annotated[
        float | None, typer.Option(min=0.1, help="SLO: ms a token after the first.", metavar="MS")
    ] = None,
    ttft: Annotated[
        float | None, typer.Option(min=1, help="SLO: ms to the first token.", metavar="MS")
    ] = None,
    target: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of requests that shall meet the SLO.")
    ] = 0.95,
    fixed: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Fixed lengths to compare; repeatable. Default: 1, γ/2, γ."),
    ] = None,
    fleet_policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Adaptive under this fleet policy too (shared_cap, weighted, lockstep, local); repeatable.",
            metavar="NAME",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option(help="Simulate each answer and let the fleet grow until it holds.")
    ] = True,
    duration: Annotated[
        float, typer.Option(min=10, help="Seconds of traffic of each check.", metavar="S")
    ] = 120.0,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw throughput, user speed and budget by load.", metavar="FILE.png"),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Size a fleet: no speculation, fixed lengths, Algorithm 1 and adaptive, on each kind of replica.

    Takes the traffic, the tables and the SLO of a scenario; its number of replicas does not matter. The
    cheapest answer comes first.
    """
    from dspark_ray.simulator.planner import plan as find
    from dspark_ray.simulator.scenario import load_scenario

    checked = changed(load_scenario(scenario), duration, None, rate, None, None)
    slo = {"tpot_ms": tpot, "ttft_ms": ttft}
    updates = {key: value for key, value in slo.items() if value is not None}
    checked = checked.model_copy(update={"slo": checked.slo.model_copy(update=updates)})
    with progress("planning", err) as tell:
        answers, curves = find(
            checked,
            target=target,
            fixed=fixed,
            fleet_policies=fleet_policy or (),
            check=check,
            on_progress=tell,
        )
    _print(checked, answers)
    if plot is not None:
        draw(curves, plot, checked.slo.tpot_ms)
    if json is not None:
        write_json(
            json,
            {
                "scenario": checked.model_dump(mode="json"),
                "answers": [asdict(answer) for answer in answers],
                "curves": [asdict(curve) for curve in curves],
            },
        )


def draw(curves: "list[Curve]", path: Path, tpot_ms: float) -> None:
    """Three panels: throughput against a user's speed, and throughput and budget against load."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ConfigError('--plot needs matplotlib: pip install "dspark-ray[bench]"') from error
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    several = len({curve.kind for curve in curves}) > 1
    for curve in curves:
        label = curve.candidate.name + (f", kind {curve.kind + 1}" if several else "")
        style = {"label": label, "marker": "o", "markersize": 3}
        load = [point.requests for point in curve.points]
        total = [point.tokens_per_s for point in curve.points]
        axes[0].plot([point.tokens_per_s_per_user for point in curve.points], total, **style)
        axes[1].plot(load, total, **style)
        axes[2].plot(load, [point.budget_tokens / point.requests for point in curve.points], **style)
    axes[0].axvline(1e3 / tpot_ms, color="grey", linewidth=0.8, linestyle="--")
    axes[0].annotate("SLO", (1e3 / tpot_ms, 0), xytext=(3, 3), textcoords="offset points", color="grey")
    for axis, x, y in (
        (axes[0], "tokens/s of a user", "tokens/s of a replica"),
        (axes[1], "requests decoding", "tokens/s of a replica"),
        (axes[2], "requests decoding", "draft tokens verified a request and step"),
    ):
        axis.set(xlabel=x, ylabel=y)
        axis.grid(alpha=0.3)
    for axis in axes[1:]:
        axis.set_xscale("log", base=2)
    axes[1].legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    err.print(f"drawn to {path}", soft_wrap=True)


def _print(scenario: "Scenario", answers: "list[Answer]") -> None:
    from rich.table import Table

    slo = scenario.slo
    title = (
        f"{scenario.arrivals.rate_per_s:g} requests/s, TPOT ≤ {slo.tpot_ms:g} ms, TTFT ≤ {slo.ttft_ms:g} ms"
    )
    columns = ("policy", "kind", "replicas", "requests each", "TPOT ms", "budget", "τ", "req/s of one")
    owed = any(answer.targets_reached is not None for answer in answers)
    checked = ("met SLO", *(["met target"] if owed else []), "goodput tok/s", "cost/h", "cost/M tokens")
    table = Table(title=title, title_justify="left")
    for column in (*columns, *checked):
        table.add_column(column, no_wrap=column == "policy")
    for answer in answers:
        values = (
            answer.policy,
            str(answer.kind + 1),
            "too slow" if answer.replicas is None else str(answer.replicas),
            str(answer.requests_per_replica),
            f"{answer.tpot_ms:.1f}",
            f"{answer.budget_tokens:.1f}",
            f"{answer.tau:.2f}",
            _number(answer.requests_per_s_alone, ".2f"),
            _number(answer.slo_attainment, ".1%"),
            *([_number(answer.targets_reached, ".1%")] if owed else []),
            _number(answer.goodput_tokens_per_s, ".0f"),
            _number(answer.cost_per_hour, ".2f"),
            _number(answer.cost_per_million_good_tokens, ".3f"),
        )
        table.add_row(*values)
    out.print(table)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
