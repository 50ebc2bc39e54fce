"""The pictures of the comparisons over HTTP."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def plot_closed_loop(medians: Sequence[Row], rounds: Sequence[Row], path: Path) -> None:
    """Throughput against each user's speed and against load; budget against load; acceptance by position."""
    from matplotlib import pyplot

    figure, ((users, loads), (budgets, places)) = pyplot.subplots(2, 2, figsize=(11, 8), layout="constrained")
    for name in dict.fromkeys(row["system"] for row in medians):
        points = [row for row in medians if row["system"] == name]
        levels, speeds = [row["concurrency"] for row in points], [row["tokens_per_s"] for row in points]
        users.plot([row["user_tokens_per_s"] for row in points], speeds, "o-", label=name)
        loads.plot(levels, speeds, "o-", label=name)
        if any(row.get("tau", 1.0) > 1.0 for row in points):
            budgets.plot(levels, [row["budget_tokens"] for row in points], "o-", label=name)
            last = next(row for row in reversed(rounds) if row["system"] == name and "acceptance" in row)
            places.plot(range(1, len(last["acceptance"]) + 1), last["acceptance"], "o-", label=name)
    for axis, label, height in (
        (users, "tokens/s a user sees (median)", "tokens/s of the server"),
        (loads, "requests in flight", "tokens/s of the server"),
        (budgets, "requests in flight", "draft tokens verified a step"),
        (places, "position in the block", "accepted of verified, at the highest load"),
    ):
        axis.set_xlabel(label)
        axis.set_ylabel(height)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    users.legend(fontsize="x-small")
    for axis in (loads, budgets):
        axis.set_xscale("log", base=2)
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
