"""The pictures of the comparisons over HTTP."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def plot_closed_loop(medians: Sequence[Row], rounds: Sequence[Row], path: Path) -> None:
    """Throughput against each user's speed and against load; budget against load; acceptance by position."""
    from matplotlib import pyplot

    figure, ((users, loads), (budgets, places)) = pyplot.subplots(2, 2, figsize=(11, 8), layout="constrained")
    for number, name in enumerate(dict.fromkeys(row["system"] for row in medians)):
        style = {
            "marker": "o",
            "color": f"C{number % 10}",
            "linestyle": "-" if number < 10 else "--",
            "label": name,
        }
        points = [row for row in medians if row["system"] == name]
        levels, speeds = [row["concurrency"] for row in points], [row["tokens_per_s"] for row in points]
        users.plot([row["user_tokens_per_s"] for row in points], speeds, **style)
        loads.plot(levels, speeds, **style)
        drafted = [row for row in rounds if row["system"] == name and row.get("acceptance")]
        if drafted:
            budgets.plot(levels, [row.get("budget_tokens") for row in points], **style)
            accepted = drafted[-1]["acceptance"]
            places.plot(range(1, len(accepted) + 1), accepted, **style)
    for axis, label, height in (
        (users, "tokens/s a user sees (median)", "tokens/s of the server"),
        (loads, "requests in flight", "tokens/s of the server"),
        (budgets, "requests in flight", "draft tokens verified a step"),
        (places, "position in the block", "accepted of verified, at the last load"),
    ):
        axis.set_xlabel(label)
        axis.set_ylabel(height)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    users.set_xlim(0, 1.05 * users.get_xlim()[1])
    users.legend(fontsize="x-small")
    levels = sorted({row["concurrency"] for row in medians})
    for axis in (loads, budgets):
        axis.set_xscale("log", base=2)
        axis.set_xticks(levels, [str(level) for level in levels])
    places.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=110)


def plot_open_loop(medians: Sequence[Row], path: Path) -> None:
    """Goodput and time to the first token against the rate."""
    from matplotlib import pyplot

    figure, (good, first) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name in dict.fromkeys(row["system"] for row in medians):
        points = [row for row in medians if row["system"] == name]
        rates = [row["rate"] for row in points]
        good.plot(rates, [row["goodput_tokens_per_s"] for row in points], "o-", label=name)
        first.plot(rates, [row["ttft_p99_ms"] for row in points], "o-", label=name)
    for axis, label in ((good, "tokens/s of requests within the SLO"), (first, "TTFT p99, ms")):
        axis.set_xlabel("requests a second")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    good.legend(fontsize="x-small")
    figure.savefig(path, dpi=110)
