"""`dspark-ray evaluate`: how well the drafter of a configuration drafts on given prompts."""

from typing import Annotated

import typer

from dspark_ray.cli.common import (
    ConcurrencyOption,
    ConfigOption,
    JsonOption,
    LimitOption,
    MaxTokensOption,
    PromptsOption,
    TemperatureOption,
    load_config,
    load_engine,
    print_figures,
    step_progress,
    verifying_everything,
    write_json,
)


def evaluate(
    config: ConfigOption,
    prompts: PromptsOption,
    max_tokens: MaxTokensOption = 256,
    concurrency: ConcurrencyOption = 8,
    temperature: TemperatureOption = 0.0,
    limit: LimitOption = None,
    seed: Annotated[int, typer.Option(help="Of the sampling; prompt i takes seed + i.")] = 0,
    json: JsonOption = None,
) -> None:
    """Accepted length τ and acceptance by position of a drafter, every draft token verified.

    Position k counts where all before it were accepted. Texts end by themselves or at --max-tokens.
    """
    from dspark_ray.core.types import SamplingParams
    from dspark_ray.engine.measure import warm_up
    from dspark_ray.models.prompts import read_prompts, read_raw_prompts
    from dspark_ray.training.evaluate import evaluate as run

    checked = verifying_everything(load_config(config))
    read_raw_prompts(prompts, limit)  # a file that is wrong is said before the model is loaded
    local = load_engine(checked)
    items = read_prompts(prompts, local.tokenizer, limit)
    sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed, shared_noise=False)
    warm_up(local.engine, items[0].token_ids[:32])
    with step_progress("evaluating", len(items)) as on_step:
        result = run(
            local.engine, [i.token_ids for i in items], sampling, concurrency=concurrency, on_step=on_step
        )
    report = result.report()
    print_figures(f"{local.config.speculation.drafter.kind} on {prompts.name}", report)
    if json is not None:
        settings = {"prompts": str(prompts), "max_tokens": max_tokens, "temperature": temperature}
        content = {"report": report, **settings, "config": local.config.model_dump(mode="json")}
        write_json(json, content)
