"""Diagrams of evaluations and calibrations; matplotlib is only needed where one is asked for."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_ray.core.errors import ConfigError

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


def plot_reliability(reports: Sequence["CalibrationReport"], path: Path) -> None:
    """Reliability diagrams of survival, before and after: a row for each rule, a panel for each position."""
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
            for quality, label in ((report.before, "T = 1"), (report.after, "fitted")):
                bins = quality[position].bins
                axis.plot(bins.mean_predicted, bins.mean_outcome, marker=".", label=label)
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
