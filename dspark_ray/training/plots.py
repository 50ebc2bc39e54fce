"""Diagrams of evaluations and calibrations; matplotlib is only needed where one is asked for."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_ray.core.errors import ConfigError

MIN_IN_BIN = 20

if TYPE_CHECKING:
    from dspark_ray.training.calibrate import CalibrationReport


def plot_acceptance(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Conditional acceptance by position, one line a row, one panel a data set and temperature.

    rows: `drafter`, `prompts`, `temperature` and a `report` of `Evaluation.report()`.
    """
    pyplot = _pyplot()
    panels = list(dict.fromkeys((row["prompts"], row["temperature"]) for row in rows))
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4.5 * len(panels), 3.6), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, (prompts, temperature) in zip(axes[0], panels, strict=True):
        for row in rows:
            if (row["prompts"], row["temperature"]) == (prompts, temperature):
                values = [v for v in row["report"]["conditional_acceptance"] if v is not None]
                label = f"{row['drafter']}, τ {row['report']['tau']:.2f}"
                axis.plot(range(1, len(values) + 1), values, marker="o", label=label)
        axis.set(title=f"{prompts}, T = {temperature:g}", xlabel="position", ylim=(0, 1))
        axis.legend(fontsize="small")
    axes[0][0].set_ylabel("accepted, given all before")
    _save(figure, path)


def plot_thresholds(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The share of verified tokens that stand, and τ, by least survival: a line for each drafter, data set
    and temperature.

    rows: as for `plot_acceptance`, with a `threshold`.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    lines = dict.fromkeys((row["drafter"], row["prompts"], row["temperature"]) for row in rows)
    figures = (
        ("accepted_share", "verified tokens that stand"),
        ("tau", "τ, tokens a target step"),
        ("verified_tokens_per_step", "verified draft tokens a step"),
    )
    for axis, (key, title) in zip(axes, figures, strict=True):
        for drafter, prompts, temperature in lines:
            own = [
                r
                for r in rows
                if (r["drafter"], r["prompts"], r["temperature"]) == (drafter, prompts, temperature)
            ]
            points = sorted((r["threshold"], r["report"][key]) for r in own if r["report"][key] is not None)
            label = f"{drafter}, {prompts}, T = {temperature:g}"
            axis.plot(*zip(*points, strict=True), marker="o", label=label)
        axis.set(xlabel="least survival verified", title=title)
    axes[0].set_ylim(0, 1)
    axes[0].legend(fontsize="small")
    _save(figure, path)


def plot_sweep(
    rows: Sequence[Mapping[str, Any]],
    heads: Sequence[Mapping[str, Any]],
    path: Path,
    *,
    depth: int,
    block: int,
) -> None:
    """τ on held-out texts by depth at `block`, by block length at `depth`; what the sequential head costs.

    rows: `kind`, `num_layers`, `block_size` and a `report` with `tau_sampling` and `tau_greedy`; heads:
    `block_size`, `requests` and `share` of a round.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    panels = (
        ("num_layers", "draft layers", "block_size", block, f"depth, blocks of {block}"),
        ("block_size", "block length", "num_layers", depth, f"block length, {depth} layers"),
    )
    for axis, (along, label, fixed, value, title) in zip(axes, panels, strict=False):
        alike = sorted((r for r in rows if r[fixed] == value), key=lambda r: r[along])
        for kind in dict.fromkeys(row["kind"] for row in rows):
            own = [row for row in alike if row["kind"] == kind]
            for key, name, style in (("tau_sampling", "T = 1", "-"), ("tau_greedy", "T = 0", "--")):
                axis.plot(
                    [row[along] for row in own],
                    [row["report"][key] for row in own],
                    marker="o",
                    linestyle=style,
                    color="C0" if kind == "dspark" else "C1",
                    label=f"{kind}, {name}",
                )
        ticks = sorted({row[along] for row in alike})
        axis.set(xlabel=label, ylabel="τ on held-out texts", xticks=ticks, title=title)
    axes[0].legend(fontsize="small")
    for requests in dict.fromkeys(head["requests"] for head in heads):
        points = sorted((h["block_size"], 100 * h["share"]) for h in heads if h["requests"] == requests)
        axes[2].plot(*zip(*points, strict=True), marker="o", label=f"requests: {requests}")
    axes[2].set(xlabel="block length", ylabel="% of a round's time", title="cost of the sequential head")
    axes[2].set_xticks(sorted({head["block_size"] for head in heads}))
    axes[2].legend(fontsize="small")
    _save(figure, path)


def plot_reliability(reports: Sequence["CalibrationReport"], path: Path) -> None:
    """Reliability diagrams of survival, before and after: a row for each rule, a panel for each position.

    Bins of fewer than `MIN_IN_BIN` blocks are left out: where they lie is chance.
    """
    pyplot = _pyplot()
    columns = max(len(report.before) for report in reports)
    figure, axes = pyplot.subplots(
        len(reports),
        columns,
        figsize=(2.2 * columns, 2.5 * len(reports)),
        squeeze=False,
        layout="constrained",
    )
    for row, report in zip(axes, reports, strict=True):
        for position, axis in enumerate(row):
            axis.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
            for quality, label in ((report.before, "head alone"), (report.after, "fitted")):
                bins = quality[position].bins
                told = bins.count >= MIN_IN_BIN
                axis.plot(bins.mean_predicted[told], bins.mean_outcome[told], marker=".", label=label)
            axis.set(xlim=(0, 1), ylim=(0, 1), title=f"{report.rule}, position {position + 1}")
            axis.title.set_fontsize("small")
        row[0].set_ylabel("survived")
        row[0].legend(fontsize="x-small")
    _save(figure, path)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("a diagram needs matplotlib: pip install 'dspark-ray[bench]'") from error
    matplotlib.use("Agg")  # no display is needed, nor opened
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    finally:
        _pyplot().close(figure)
