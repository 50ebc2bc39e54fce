"""Servers under requests that do not wait for each other: goodput at an SLO against the rate.

    python benchmarks/serving/open_loop.py --prompts FILE.jsonl [--rates 1 2 4] [--seconds 30]
        [--arrivals poisson | --arrivals bursts | --arrivals LOG.jsonl --speeds 1 2]
        [--systems "dspark-ray adaptive" "vllm plain"] [--slo 500:50] [--set VLLM_VENV=DIR]

`poisson` is a gamma law of shape 1, `bursts` one of shape 0.25. A log (a record of steps, or JSON lines with
arrived_ms, prompt_tokens, output_tokens) gives times and answers' lengths, the prompts come from the prompt
files; `--speeds 2` replays it twice as fast. All servers get the same requests at the same times of a round,
one server after another; rounds are interleaved as in compare.py, and each round has other times.
Writes benchmarks/results/NAME.json and NAME.png.
"""

import argparse
from functools import partial
from pathlib import Path

import numpy as np
from harness import Bench, Row, add_options, opened, repeated, result_of, write
from plots import plot_open_loop
from servers import Server

from dspark_ray.cli.bench import print_rows
from dspark_ray.profiling.arrivals import logged_arrivals, random_arrivals
from dspark_ray.profiling.load import Arrival, LoadReport, drive_open

SHAPES = {"poisson": 1.0, "bursts": 0.25}
SHOWN = ("system", "goodput_tokens_per_s", "within_slo", "tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "tau")


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, "open-loop")
    parser.add_argument("--arrivals", default="poisson", help="poisson, bursts, or a log's path")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.0, 4.0], help="requests a second")
    parser.add_argument("--speeds", type=float, nargs="+", default=[1.0], help="of a log")
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals at each rate")
    options = parser.parse_args()

    rows: list[Row] = []
    with opened(options) as bench:
        for rate in options.rates if options.arrivals in SHAPES else options.speeds:
            load = f"{Path(options.arrivals).stem} {rate:g}"
            for number in range(options.rounds):
                drive_one = partial(send, arrivals=arrivals(bench, rate, number))
                rows += [{"load": load, "rate": rate, **row} for row, _ in bench.round(number, drive_one)]
        result = result_of(bench, "open_loop.py", rows, [])
    for load in dict.fromkeys(row["load"] for row in rows):
        shown = [row for row in result["medians"] if row["load"] == load]
        print_rows([{key: row.get(key) for key in SHOWN} for row in shown], load)
    plot_open_loop(result["medians"], write(options.name, result).with_suffix(".png"))


def arrivals(bench: Bench, rate: float, number: int) -> list[Arrival]:
    """What comes in one round, the same for all servers."""
    options = bench.options
    count = max(int(rate * options.seconds), 1)
    most = np.full(count, options.max_tokens)
    if options.arrivals in SHAPES:
        rng = np.random.default_rng(number)
        times = random_arrivals(rate, count, rng, SHAPES[options.arrivals])
    else:
        times, most = logged_arrivals(Path(options.arrivals), 10**6, rate)
    prompts = repeated(bench.prompts, len(times))
    return [Arrival(float(t), p, int(n)) for t, p, n in zip(times, prompts, most, strict=True)]


def send(server: Server, arrivals: list[Arrival]) -> LoadReport:
    """All of them to one server, greedy."""
    fields = {"temperature": 0.0, **server.system.body}
    asked = [Arrival(a.at_s, a.prompt, a.max_tokens, fields) for a in arrivals]
    return drive_open(server.url, server.model, asked)


if __name__ == "__main__":
    main()
