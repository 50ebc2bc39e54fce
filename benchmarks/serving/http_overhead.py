"""What HTTP costs: the same prompts through an engine in this process and through the server, in turn.

    python benchmarks/serving/http_overhead.py --prompts FILE.jsonl [--concurrency 32] [--limit 96]
        [--rounds 3] [--systems "dspark-ray off"]

The server is paused while the engine here runs. Both have the same configuration, `off` or `adaptive`. Ours
are behind HAProxy; "dspark-ray off, Serve's proxy" is not.
Writes benchmarks/results/NAME.json: throughput of both, their ratio round by round, CPU seconds by process.
"""

import argparse
from functools import partial
from statistics import median

from harness import DEFAULT_MODEL, Row, add_options, closed_loop, opened, repeated, result_of, write

from dspark_ray.cli.bench import print_rows
from dspark_ray.cli.common import load_config, prepare_torch
from dspark_ray.core.types import Request, SamplingParams
from dspark_ray.engine.measure import timed_run, warm_up
from dspark_ray.models.fetch import resolve_model
from dspark_ray.models.prompts import read_prompts
from dspark_ray.models.tokenizer import Tokenizer
from dspark_ray.profiling.compare import build_contenders, kv_tokens_needed


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, "http-overhead")
    parser.set_defaults(systems=["dspark-ray off"])
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--limit", type=int, default=96, help="prompts")
    options = parser.parse_args()
    if len(options.prompts) != 1 or len(options.systems) != 1:
        parser.error("one prompt file and one system are compared")

    config = load_config(DEFAULT_MODEL)
    prepare_torch(config)
    model_dir = resolve_model(config.model.source)
    items = read_prompts(options.prompts[0], Tokenizer.load(model_dir), options.limit)
    prompts = [item.token_ids for item in items]
    mode = options.systems[0].removeprefix("dspark-ray ").split(",")[0]
    kv_tokens = kv_tokens_needed(prompts, options.concurrency, options.max_tokens)
    engine = build_contenders(config, model_dir, [mode], kv_tokens=kv_tokens)[mode]
    warm_up(engine, list(prompts[0])[:32])
    sampling = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    requests = [Request(f"prompt-{n}", tuple(prompt), sampling) for n, prompt in enumerate(prompts)]

    rows: list[Row] = []
    with opened(options) as bench:
        drive_one = partial(
            closed_loop,
            prompts=repeated(bench.prompts, len(prompts)),
            concurrency=options.concurrency,
            max_tokens=options.max_tokens,
        )
        for number in range(options.rounds):
            offline = timed_run(engine, requests, concurrency=options.concurrency)
            [(row, _)] = bench.round(number, drive_one)
            cost = 1 - row["tokens_per_s"] / offline.tokens_per_s
            told = {"offline_tokens_per_s": offline.tokens_per_s, "offline_tokens": offline.num_tokens}
            rows.append({"load": f"{options.concurrency}:{len(prompts)}", **row, **told, "http_cost": cost})
        result = result_of(bench, "http_overhead.py", rows, [])
    shown = ("offline_tokens_per_s", "tokens_per_s", "http_cost", "ttft_p50_ms", "tpot_p50_ms")
    print_rows([{key: row[key] for key in shown} for row in rows], "offline and over HTTP")
    print(f"HTTP costs {median(row['http_cost'] for row in rows):.1%} of the offline engine's tokens/s")
    write(options.name, result)


if __name__ == "__main__":
    main()
