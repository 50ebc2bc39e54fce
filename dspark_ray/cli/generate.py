"""`dspark-ray generate`: a prompts file through the engine in this process."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark_ray.cli.common import (
    ConcurrencyOption,
    ConfigOption,
    JsonOption,
    LimitOption,
    MaxTokensOption,
    ModeOption,
    PromptsOption,
    TemperatureOption,
    load_config,
    load_engine,
    out,
    print_figures,
    step_progress,
    write_json,
)

if TYPE_CHECKING:
    from dspark_ray.engine.measure import TimedRun


def generate(
    config: ConfigOption,
    prompts: PromptsOption,
    mode: ModeOption = None,
    max_tokens: MaxTokensOption = 256,
    concurrency: ConcurrencyOption = 8,
    temperature: TemperatureOption = 0.0,
    limit: LimitOption = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop string; may be repeated.", metavar="TEXT")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the sampling; prompt i takes seed + i.")] = None,
    json: JsonOption = None,
) -> None:
    """Answer every prompt of a file, without a server: tokens/s, τ, acceptance by position, texts.

    Without --json the texts are printed.
    """
    from dspark_ray.core.types import Request, SamplingParams
    from dspark_ray.engine.measure import timed_run, warm_up
    from dspark_ray.models.prompts import read_prompts, read_raw_prompts
    from dspark_ray.models.tokenizer import IncrementalDetokenizer

    checked = load_config(config, mode=mode)
    read_raw_prompts(prompts, limit)  # a file that is wrong is said before the model is loaded
    local = load_engine(checked)
    items = read_prompts(prompts, local.tokenizer, limit)
    requests = [
        Request(
            f"line-{item.line}",
            item.token_ids,
            SamplingParams(
                temperature=temperature,
                max_tokens=max_tokens,
                seed=None if seed is None else seed + number,
                stop_token_ids=local.tokenizer.eos_token_ids,
            ),
        )
        for number, item in enumerate(items)
    ]
    detokenizers = [IncrementalDetokenizer(local.tokenizer, stop=stop or ()) for _ in items]
    warm_up(local.engine, items[0].token_ids[:32])
    with step_progress("generating", len(requests)) as on_step:
        run = timed_run(
            local.engine, requests, concurrency=concurrency, on_step=on_step, detokenizers=detokenizers
        )
    speculation = local.config.speculation
    figures = {
        "mode": speculation.mode.value,
        "drafter": speculation.drafter.kind,
        "concurrency": concurrency,
        **run_figures(run),
    }
    if json is None:
        for completion in run.completions:
            answer = f"[error: {completion.error}]" if completion.error else completion.text
            out.rule(f"{completion.request_id} ({completion.finish_reason.value})", align="left")
            out.print(answer, markup=False)
    print_figures("generate", figures)
    if json is not None:
        settings = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "stop": stop or []}
        content = {
            "figures": figures,
            "settings": {**settings, "prompts": str(prompts), "config": local.config.model_dump(mode="json")},
            "completions": [_as_dict(completion) for completion in run.completions],
        }
        write_json(json, content)


def run_figures(run: "TimedRun") -> dict[str, Any]:
    """What a run is judged by."""
    counters, steps = run.counters, run.steps
    errors = sum(bool(completion.error) for completion in run.completions)
    return {
        "requests": len(run.completions),
        "refused requests": errors,
        "output tokens": run.num_tokens,
        "wall s": run.wall_s,
        "tokens/s": run.tokens_per_s,
        "decode tokens/s": run.decode_tokens_per_s,
        "τ": counters.tau,
        "drafted": counters.drafted_tokens,
        "verified": counters.verified_tokens,
        "trimmed": counters.trimmed_tokens,
        "accepted": counters.accepted_tokens,
        "acceptance by position": counters.acceptance_per_position,
        "mean budget": steps.mean_budget_tokens,
        "steps that trimmed": steps.trimmed_share,
    }


def _as_dict(completion: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "id": completion.request_id,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason.value,
        "error": completion.error,
        "usage": asdict(completion.usage),
        "first_token_ms": completion.first_token_ms - completion.submitted_ms,
        "total_ms": completion.ended_ms - completion.submitted_ms,
    }
