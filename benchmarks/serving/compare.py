"""Servers side by side over HTTP: the same prompts, the same client, one awake at a time, rounds interleaved.

    python benchmarks/serving/compare.py --prompts FILE.jsonl [FILE.jsonl ...] [--loads 1:16 8:64 32:96]
        [--systems "dspark-ray adaptive" "vllm plain"] [--rounds 3] [--max-tokens 128]
        [--set VLLM_VENV=DIR LLAMA_SERVER=FILE GGUF=FILE]

A load is REQUESTS_IN_FLIGHT:PROMPTS. systems.yaml says how each server is started and which variables it
needs. All are started and warm before anything is measured, and paused (SIGSTOP) while another one is; the
order rotates from round to round, and ratios are taken within a round. Greedy, natural ends.
Writes benchmarks/results/NAME.json and NAME.png. Needs an otherwise idle machine, memory for all
systems at once, and `pip install -e ".[bench]"`.
"""

import argparse
from functools import partial

from harness import Row, add_options, closed_loop, opened, ratios, repeated, result_of, write
from plots import plot_closed_loop

from dspark_ray.cli.bench import print_rows

SHOWN = (
    "tokens_per_s",
    "user_tokens_per_s",
    "ttft_p50_ms",
    "tpot_p50_ms",
    "tau",
    "distinct_4grams",
    "errors",
)


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, "serving")
    parser.add_argument("--loads", nargs="+", default=["1:16", "8:64", "32:96"], metavar="N:PROMPTS")
    options = parser.parse_args()

    rows: list[Row] = []
    ratio_rows: list[Row] = []
    with opened(options) as bench:
        for load in options.loads:
            concurrency, count = map(int, load.split(":"))
            prompts = repeated(bench.prompts, count)
            print(f"{concurrency} requests in flight, {count} prompts")
            drive_one = partial(
                closed_loop, prompts=prompts, concurrency=concurrency, max_tokens=options.max_tokens
            )
            rounds = [bench.round(number, drive_one, concurrency) for number in range(options.rounds)]
            rows += [{"load": load, **row} for results in rounds for row, _ in results]
            ratio_rows += ratios(load, rounds)
        result = result_of(bench, "compare.py", rows, ratio_rows)
    for load in options.loads:
        print_rows([_shown(row) for row in result["medians"] if row["load"] == load], load)
    plot_closed_loop(result["medians"], result["rounds"], write(options.name, result).with_suffix(".png"))


def _shown(row: Row) -> Row:
    """A row that fits into a terminal."""
    ratio = "{:.2f} ({:.2f}–{:.2f})".format(*row["ratio"]) if "ratio" in row else "1"
    return {"system": row["system"], "ratio": ratio, **{key: row.get(key) for key in SHOWN}}


if __name__ == "__main__":
    main()
