"""The `dspark-ray` command: puts the commands together and turns known errors into one line.

Nothing here or at the top of a command module imports torch or ray, so that `--help` answers at once.
"""

import logging
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dspark_ray.cli import (
    bench,
    calibrate,
    chat,
    check,
    evaluate,
    fetch,
    generate,
    new_key,
    plan,
    profile,
    serve,
    simulate,
    swap_drafter,
    top,
    train,
)
from dspark_ray.cli.common import print_error
from dspark_ray.core.errors import DsparkError

USER_ERROR = 2  # exit status of everything the user can put right


class _Commands(TyperGroup):
    """All commands; an error that this program raises on purpose is a message, not a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DsparkError as error:
            print_error(str(error))
            raise typer.Exit(USER_ERROR) from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Every command has its own --help. Converted models and step tables are cached in "
    "$DSPARK_CACHE_DIR (~/.cache/dspark-ray).",
)


@app.callback()
def _options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the log lines too.")] = False,
) -> None:
    """Serve open-weight language models with DSpark speculative decoding, on Ray Serve or in process.

    Start with: `dspark-ray serve configs/smollm2-135m-cpu.yaml`
    """
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")


_SERVE, _MAKE, _MEASURE, _PLAN = "Serve and talk", "Make a drafter", "Measure", "Plan a fleet"

app.command("fetch", rich_help_panel=_SERVE)(fetch.fetch)
app.command("check", rich_help_panel=_SERVE)(check.check)
app.command("serve", rich_help_panel=_SERVE)(serve.serve)
app.command("chat", rich_help_panel=_SERVE)(chat.chat)
app.command("top", rich_help_panel=_SERVE)(top.top)
app.command("swap-drafter", rich_help_panel=_SERVE)(swap_drafter.swap_drafter)
app.command("new-key", rich_help_panel=_SERVE)(new_key.new_key)
app.command("generate", rich_help_panel=_SERVE)(generate.generate)
app.command("generate-data", rich_help_panel=_MAKE)(train.generate_data)
app.command("train", rich_help_panel=_MAKE)(train.train)
app.command("evaluate", rich_help_panel=_MAKE)(evaluate.evaluate)
app.command("calibrate", rich_help_panel=_MAKE)(calibrate.calibrate)
app.command("profile", rich_help_panel=_MEASURE)(profile.profile)
app.command("bench", rich_help_panel=_MEASURE)(bench.bench)
app.command("plan", rich_help_panel=_PLAN)(plan.plan)
app.command("simulate", rich_help_panel=_PLAN)(simulate.simulate)
