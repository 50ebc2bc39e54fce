"""Our router against Serve's default: the same bursty open-loop load on unequal replicas of the timed engine.

    python benchmarks/fleet/routers.py [--seconds 45] [--rate 2.4] [--rounds 2] [--name fleet-routers]

The whole application runs: Ray, Serve, proxy, ingress, router, central scheduler. Only the model is replaced,
by one that sleeps: figures are simulated, and depend on the machine as far as it is too busy to wake in time.
Conversations of several turns arrive at random, three times as many in every second eighth of the time; each
turn's prompt is the one before and more. Nothing in a request names its conversation. In each round both
routers get the same requests at the same times, on an application just started, in alternating order; other
rounds have other requests. Goodput counts the tokens of requests whose first token came within --ttft-ms and
whose time per output token kept to --tpot-ms. Writes benchmarks/results/NAME.json and NAME.png.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from local_fleet import Application, header, local_cluster, running, save_tables, write_result

from dspark_ray.core.config import AppConfig, parse_app_config
from dspark_ray.models.prompts import RawPrompt
from dspark_ray.profiling.load import Arrival, ClientTiming, Slo, drive_open

MODEL = "timed"
ROUTERS = ("pow2", "goodput")
SLOWNESS = (1.0, 1.0, 3.0)  # of the replicas. Long steps keep events few
ROWS, VERIFY_MS = (1, 16, 64, 512), (90.0, 105.0, 150.0, 600.0)
ACCEPTANCE = ((0.85, 0.8), (0.6, 0.5))
NUM_TALKS, TURNS, FIRST_WORDS, TURN_WORDS = 12, 6, 90, 30
BURSTS, BURST_FACTOR = 4, 3.0
SHOWN = ("goodput_tokens_per_s", "within_slo", "tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p99_ms")

Row = dict[str, Any]


def config(router: str, tables: list[str]) -> AppConfig:
    """Equal in all but the router."""
    return parse_app_config(
        {
            "model": {"id": MODEL},
            "engine": {
                "kind": "timed",
                "timed": {"step_tables": tables, "acceptance": ACCEPTANCE},
                "max_running": 8,
            },
            "speculation": {"num_draft_tokens": 4},
            "serving": {"num_replicas": len(SLOWNESS), "replica_cpus": 0.1, "router": router},
        }
    )


def conversations(seconds: float, rate: float, seed: int) -> list[Arrival]:
    """Each arrival is the next turn of one of the talks that go on; an ended one is followed by another."""
    rng = np.random.default_rng(seed)
    arrivals: list[Arrival] = []
    talks = [(number, int(rng.integers(TURNS))) for number in range(NUM_TALKS)]  # number, turns so far
    num_talks, at_s = NUM_TALKS, 0.0
    while True:
        in_burst = int(2 * BURSTS * at_s / seconds) % 2 == 1
        at_s += float(rng.exponential(1.0 / (rate * (BURST_FACTOR if in_burst else 1.0))))
        if at_s >= seconds:
            return arrivals
        place = int(rng.integers(NUM_TALKS))
        talk, turns = talks[place]
        text = f"talk {seed}.{talk} " + f"{talk} and so on " * (FIRST_WORDS // 4 + TURN_WORDS // 4 * turns)
        arrivals.append(Arrival(at_s, RawPrompt(len(arrivals), text=text), int(rng.integers(16, 65))))
        if turns + 1 < TURNS:
            talks[place] = (talk, turns + 1)
        else:
            talks[place] = (num_talks, 0)
            num_talks += 1


def measure(application: Application, arrivals: list[Arrival], slo: Slo) -> tuple[Row, list[ClientTiming]]:
    """One router in one round: what the clients saw, and where their prompts were found."""
    drive_open(application.url, MODEL, conversations(3.0, 1.5, seed=10**6))  # loads have been reported
    before = application.stats()
    report = drive_open(application.url, MODEL, arrivals)
    after = application.stats()
    ended = {name: stats.num_finished - before[name].num_finished for name, stats in after.items()}
    hits = sum(stats.prefix_hit_tokens - before[name].prefix_hit_tokens for name, stats in after.items())
    asked = sum(stats.prefix_query_tokens - before[name].prefix_query_tokens for name, stats in after.items())
    speeds = {name: stats.rates[0][1] for name, stats in after.items()}
    slowest = min(speeds, key=lambda name: speeds[name])
    row = {
        **report.goodput(slo),
        **report.figures(),
        "requests_at_the_slow_replica": ended[slowest],
        "prefix_hits": hits / max(asked, 1),
    }
    return row, report.timings


def plot(rows: list[Row], timings: dict[str, list[ClientTiming]], slo: Slo, path: Path) -> None:
    """Goodput of each round; how many requests were as quick as that."""
    from matplotlib import pyplot

    figure, (good, first, each) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for number, router in enumerate(ROUTERS):
        mine = [row for row in rows if row["router"] == router]
        places = [row["round"] + 0.36 * (number - 0.5) for row in mine]
        good.bar(places, [row["goodput_tokens_per_s"] for row in mine], width=0.34, label=router)
        for axis, values in (
            (first, [one.ttft_ms for one in timings[router] if not one.error]),
            (each, [one.tpot_ms for one in timings[router] if not one.error and one.tpot_ms]),
        ):
            axis.plot(np.sort(values), np.arange(1, len(values) + 1) / len(values), label=router)
    good.set_xticks(sorted({row["round"] for row in rows}))
    good.set_xlabel("round")
    good.set_ylabel("goodput, tokens/s")
    for axis, limit, label in (
        (first, slo.ttft_ms, "ms to the first token"),
        (each, slo.tpot_ms, "ms per output token"),
    ):
        axis.axvline(limit, color="black", linestyle=":")
        axis.set_xlabel(label)
        axis.set_ylabel("share of requests")
        axis.set_ylim(0, 1.02)
    for axis in (good, first, each):
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle("Timed engine (simulated): two fast replicas and a slow one, conversations in bursts")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=45.0, help="of arrivals in a round")
    parser.add_argument("--rate", type=float, default=2.4, help="requests/s between bursts")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ttft-ms", type=float, default=1500.0)
    parser.add_argument("--tpot-ms", type=float, default=150.0)
    parser.add_argument("--name", default="fleet-routers", help="of the result files")
    options = parser.parse_args()

    slo = Slo(options.ttft_ms, options.tpot_ms)
    rows: list[Row] = []
    timings: dict[str, list[ClientTiming]] = {router: [] for router in ROUTERS}
    with tempfile.TemporaryDirectory() as folder, local_cluster() as base_url:
        tables = save_tables(Path(folder), SLOWNESS, ROWS, VERIFY_MS)
        for number in range(options.rounds):
            arrivals = conversations(options.seconds, options.rate, number)
            for router in ROUTERS if number % 2 == 0 else reversed(ROUTERS):
                with running(base_url, config(router, tables), f"{router}-{number}") as application:
                    row, seen = measure(application, arrivals, slo)
                rows.append({"router": router, "round": number, **row})
                timings[router] += seen
                print(router, {key: row[key] for key in row}, flush=True)
    medians = {
        router: {key: median(row[key] for row in rows if row["router"] == router) for key in SHOWN}
        for router in ROUTERS
    }
    result = {**header(), "slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms}}
    path = write_result(options.name, {**result, "medians": medians, "rounds": rows})
    plot(rows, timings, slo, path.with_suffix(".png"))
    for router in ROUTERS:
        print(router, {key: round(value, 3) for key, value in medians[router].items()})


if __name__ == "__main__":
    main()
