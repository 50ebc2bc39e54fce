"""`dspark-ray train` and `generate-data`: a drafter for a target, from the target's own texts."""

import logging
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from dspark_ray.cli.common import PROMPT_SHAPES


class BadData(Enum):
    """What bad data do; they are named either way."""

    SKIP = "skip"
    STOP = "stop"


def train(
    config: Annotated[Path, typer.Argument(help="A training config, e.g. configs/training/*.yaml.")],
    minutes: Annotated[
        float | None, typer.Option(min=0.01, help="Save and stop after this time; run it again to continue.")
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="As a Ray Train job, on the cluster of RAY_ADDRESS or a local one.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="With --ray: processes.")] = 1,
    cpus_per_worker: Annotated[int, typer.Option(min=1, help="With --ray: cores of each.")] = 1,
    max_failures: Annotated[
        int, typer.Option(min=0, help="With --ray: how often lost workers are replaced.")
    ] = 0,
) -> None:
    """Train a drafter, or continue where the last run stopped.

    Ctrl-C saves and stops (with --ray it stops: the last `save_minutes` are lost). The run's folder gets
    `state.pt` (to continue), `metrics.jsonl` and `checkpoint/`, which `speculation.drafter.path` can name at
    once. Calibrate it afterwards.
    """
    from dspark_ray.cli.common import err
    from dspark_ray.training.config import load_training_config
    from dspark_ray.training.trainer import train as run

    overrides = {} if minutes is None else {"minutes": minutes}
    checked = load_training_config(config, **overrides)
    if ray:
        from dspark_ray.runtime.train_job import TrainingJob, train_on_ray

        train_on_ray(TrainingJob(checked, workers, cpus_per_worker, max_failures))
        return
    if err.is_terminal:
        from dspark_ray.cli.train_progress import training_display

        with training_display(checked.optimizer.total_steps) as display:
            run(checked, [display])
    else:
        logging.getLogger().setLevel(logging.INFO)
        run(checked)
    checkpoint = checked.output / "checkpoint"
    err.print(
        f"the drafter: {checkpoint}; `dspark-ray evaluate` and `calibrate` take it by -d", soft_wrap=True
    )


def generate_data(
    to: Annotated[Path, typer.Argument(help="JSON lines to append to.", metavar="OUT.jsonl")],
    prompts: Annotated[
        Path | None, typer.Option(help="Answer these instead: " + PROMPT_SHAPES, metavar="FILE.jsonl")
    ] = None,
    bad_data: Annotated[
        BadData, typer.Option(help="With --prompts: a line that is no prompt, or cannot be answered.")
    ] = BadData.SKIP,
    minutes: Annotated[float, typer.Option(min=0.01, help="How long to write at most.")] = 20.0,
    model: Annotated[str, typer.Option(help="'default', a directory or a hub id.")] = "default",
    openings: Annotated[
        Path | None, typer.Option(help="How user turns begin, e.g. configs/training/openings/general.yaml.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Texts written at the same time.")] = 96,
    seed: Annotated[int | None, typer.Option(help="Default: another one each time.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Torch threads; default: all cores.")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes that share the target.")] = 1,
) -> None:
    """Let the target write training data: it invents the user's turn, then answers it, or answers --prompts.

    No external data set is needed; answers to your own prompts are better. Prompts that OUT already answers
    are not answered again. Lines are appended whole, so it can be stopped at any time, and several
    processes can write to different files while `train` reads them all.
    """
    from dspark_ray.cli.common import start_ranks
    from dspark_ray.training.generate import main

    arguments = [str(to), "--minutes", str(minutes), "--model", model, "--concurrency", str(concurrency)]
    arguments += ["--bad-data", bad_data.value]
    arguments += ["--ranks", str(ranks)]
    arguments += [] if seed is None else ["--seed", str(seed)]
    arguments += [] if openings is None else ["--openings", str(openings)]
    arguments += [] if prompts is None else ["--prompts", str(prompts)]
    main(arguments + ([] if threads is None else ["--threads", str(threads)]), start_ranks)
