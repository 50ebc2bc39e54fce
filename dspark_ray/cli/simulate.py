"""`dspark-ray simulate`: a fleet under a load, without a model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark_ray.cli.common import MODES, JsonOption, err, print_figures, write_json
from dspark_ray.core.errors import ConfigError
from dspark_ray.observability.progress import progress

if TYPE_CHECKING:
    from dspark_ray.simulator.scenario import Scenario

ScenarioArgument = Annotated[
    Path, typer.Argument(help="What is simulated; see configs/simulation/.", metavar="SCENARIO.yaml")
]


def simulate(
    scenario: ScenarioArgument,
    duration: Annotated[float | None, typer.Option(min=1, help="Seconds of traffic.", metavar="S")] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Of the first kind, instead of the scenario's.", metavar="N")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests per second.", metavar="PER_S")
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help=f"Verification mode: {', '.join(MODES)}.", metavar="MODE")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Another draw of the same.")] = None,
    json: JsonOption = None,
) -> None:
    """Run traffic through replicas on paper: throughput, TTFT, TPOT, budget, τ, goodput at an SLO.

    The policies are the program's own; step times come from step tables, acceptance from records or models.
    """
    from dspark_ray.simulator.run import simulate as run
    from dspark_ray.simulator.scenario import load_scenario

    checked = changed(load_scenario(scenario), duration, replicas, rate, mode, seed)
    with progress(f"simulating {checked.duration_s:,.0f} s", err) as tell:
        result = run(checked, on_progress=lambda share: tell(share, f"{share * checked.duration_s:,.0f} s"))
    print_figures(f"simulated: {scenario.stem}", readable(result.figures))
    if json is not None:
        content = {"scenario": checked.model_dump(mode="json"), "figures": result.figures}
        write_json(json, {**content, "timeline": result.timeline})


def changed(
    scenario: "Scenario",
    duration: float | None,
    replicas: int | None,
    rate: float | None,
    mode: str | None,
    seed: int | None,
) -> "Scenario":
    """The scenario with what the command line says otherwise, checked again."""
    from dspark_ray.simulator.scenario import parse_scenario

    data = scenario.model_dump()
    if duration is not None:
        data["duration_s"] = duration
        data["warm_up_s"] = min(data["warm_up_s"], duration / 10)
        data["faults"] = [fault for fault in data["faults"] if fault["at_s"] < duration]
    if replicas is not None:
        data["replicas"][0]["count"] = replicas
    if rate is not None:
        if data["arrivals"]["rate_per_s"] is None:
            raise ConfigError(f"--rate: arrivals of kind {data['arrivals']['kind']!r} have no rate")
        data["arrivals"]["rate_per_s"] = rate
    if mode is not None:
        data["speculation"]["mode"] = mode
    if seed is not None:
        data["seed"] = seed
    return parse_scenario(data, Path.cwd())


def readable(figures: dict[str, Any]) -> dict[str, Any]:
    """What is printed of a result: the times' quantiles in a line each."""
    shown = {
        "replicas": figures["replicas"],
        "answers": figures["answers"],
        "requests/s": figures["requests_per_s"],
        "tokens/s": figures["tokens_per_s"],
        "goodput, tokens/s": figures["goodput_tokens_per_s"],
        "share of requests that met the SLO": figures["slo_attainment"],
        "τ": figures["tau"],
        "draft tokens verified a step": figures["budget_tokens"],
        "requests decoding a step": figures["requests_decoding"],
        "step ms": figures["step_ms"],
    }
    for name in ("ttft_ms", "tpot_ms", "latency_ms"):
        shown[f"{name.removesuffix('_ms').upper()} ms, mean p50 p90 p99"] = list(figures[name].values())
    for name in ("refused", "preemptions", "resumed", "unanswered"):
        if figures[name]:
            shown[name] = figures[name]
    for name, task in figures["tasks"].items():
        if task["reached_target"] is not None:
            shown[f"{name}: requests that had their speed"] = task["reached_target"]
    if figures["cost"]:
        shown["cost"] = figures["cost"]
        shown["cost of a million good tokens"] = figures["cost_per_million_good_tokens"]
    return shown
