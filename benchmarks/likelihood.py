"""At temperature 1, texts of every mode are as likely as the target's own; a planted bias is found.

    python benchmarks/likelihood.py --prompts mt-bench.jsonl [--limit 80] [--samples 6] [--max-tokens 32]
        [--concurrency 16] [--dtype bfloat16] [--config configs/smollm2-135m-cpu.yaml]

Every prompt is answered `--samples` times by plain decoding, by plain decoding again, by each mode under the
rejection rule, and by `fixed` with a drafter that lies: it draws from q and claims a flatter distribution, so
that too many of its tokens are accepted. Seeds make a run repeatable; no two runs share one. Answers have
`--max-tokens` tokens, whatever ends they would have. Exits with 1 if a mode fails or the lie passes.
Writes benchmarks/results/likelihood.json.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dspark_ray.cli.common import load_config, prepare_torch
from dspark_ray.core.types import Request, SamplingParams
from dspark_ray.engine.build import DTYPES
from dspark_ray.engine.measure import TimedRun, timed_run
from dspark_ray.models.fetch import resolve_model
from dspark_ray.models.prompts import read_prompts
from dspark_ray.models.tokenizer import Tokenizer
from dspark_ray.profiling.likelihood import Likelihood, LyingDrafter, TextScores, judge, score_texts
from dspark_ray.profiling.machine import machine_facts
from dspark_ray.profiling.modes import build_modes

PROJECT_DIR = Path(__file__).resolve().parents[1]
RESULT_PATH = PROJECT_DIR / "benchmarks" / "results" / "likelihood.json"
PLAIN, PLAIN_AGAIN, LYING = "off", "off again", "fixed, lying drafter"
RUNS = {PLAIN: "off", PLAIN_AGAIN: "off", "fixed": "fixed", "adaptive": "adaptive", LYING: "fixed"}
"""Run → mode."""


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=PROJECT_DIR / "configs" / "smollm2-135m-cpu.yaml")
    parser.add_argument("--limit", type=int, default=80, help="prompts")
    parser.add_argument("--samples", type=int, default=6, help="answers to each")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    options = parser.parse_args()

    config = load_config(options.config)
    prepare_torch(config)
    model_dir = resolve_model(config.model.source)
    tokenizer = Tokenizer.load(model_dir)
    prompts = [prompt.token_ids for prompt in read_prompts(options.prompts, tokenizer, options.limit)]
    engines = build_modes(config, model_dir, ("off", "fixed", "adaptive"), options.dtype)

    runs: dict[str, TimedRun] = {}
    scores: dict[str, TextScores] = {}
    for number, (name, mode) in enumerate(RUNS.items()):
        engine = engines[mode]
        if name == LYING:
            assert engine.drafter is not None
            engine.drafter = LyingDrafter(engine.drafter)
        requests = make_requests(prompts, options.samples, options.max_tokens, number)
        runs[name] = timed_run(engine, requests, concurrency=options.concurrency)
        texts = [completion.token_ids for completion in runs[name].completions]
        answers = [texts[i : i + options.samples] for i in range(0, len(texts), options.samples)]
        scores[name] = score_texts(engine.target, prompts, answers)
        print(f"{name}: {runs[name].num_tokens} tokens in {runs[name].wall_s:.0f} s", flush=True)
    results = [
        judge(name, scores[name], scores[PLAIN], scores[PLAIN_AGAIN], runs[name].counters) for name in RUNS
    ]
    for result in results:
        print(_line(result))
    write(results, options)
    *honest, lying = results
    sys.exit(not all(one.agrees and one.is_fair for one in honest) or lying.agrees or lying.is_fair)


def make_requests(prompts: Sequence[Sequence[int]], samples: int, max_tokens: int, run: int) -> list[Request]:
    """`samples` of each prompt in turn; the rejection rule, from a generator of their own."""
    return [
        Request(
            f"{number}-{sample}",
            tuple(prompt),
            SamplingParams(
                temperature=1.0,
                seed=run * samples + sample,
                shared_noise=False,
                max_tokens=max_tokens,
                ignore_eos=True,
            ),
        )
        for number, prompt in enumerate(prompts)
        for sample in range(samples)
    ]


def write(results: Sequence[Likelihood], options: argparse.Namespace) -> None:
    """The result file."""
    result = {
        "machine": machine_facts(),
        "settings": {
            "prompts": options.prompts.name,
            "num_prompts": options.limit,
            "samples": options.samples,
            "max_tokens": options.max_tokens,
            "concurrency": options.concurrency,
            "dtype": options.dtype,
        },
        "runs": [{**asdict(one), "agrees": one.agrees, "is_fair": one.is_fair} for one in results],
    }
    RESULT_PATH.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {RESULT_PATH.relative_to(PROJECT_DIR)}")


def _line(one: Likelihood) -> str:
    return (
        f"{one.name}: log-probability {one.mean_logprob:.4f}, {one.difference:+.4f} from off (95%: ±"
        f"{one.interval:.4f}): {'agrees' if one.agrees else 'DIFFERS'}; surplus {one.surplus:+.4f} "
        f"({one.surplus_z:+.1f} standard errors): {'fair' if one.is_fair else 'UNFAIR'}; τ {one.tau:.2f}"
    )


if __name__ == "__main__":
    main()
