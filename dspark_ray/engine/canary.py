"""A drafter proves itself before it serves: a wrong one shows in the accepted length, not in shapes.

A tap off by one, a wrong rotary base, another target of the same shape: nothing of that fails, and drafts
are merely never right. So a few built-in prompts are answered, every draft verified, when an engine starts.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark_ray.core.clock import SystemClock
from dspark_ray.core.errors import ConfigError
from dspark_ray.core.types import Request, SamplingParams, VerificationMode
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.offline import generate_all
from dspark_ray.models.tokenizer import Tokenizer

log = logging.getLogger(__name__)

PROMPTS = (
    "Write a Python function that adds two numbers.",
    "What is the capital of France? Answer in one sentence.",
    "Count from one to twenty.",
    "Tom has 3 apples and buys 4 more. How many apples has he now? Reason step by step.",
)
FLOOR = 1.15  # tokens per step; guesses over a vocabulary of thousands are accepted next to never
_MAX_TOKENS = 32
_MAX_MODEL_LEN = 256


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """What the drafter did on the built-in prompts."""

    tau: float  # accepted length, the bonus token included
    num_drafts: int

    @property
    def is_alive(self) -> bool:
        return self.tau >= FLOOR


def try_drafter(engine: Engine, prompts: Sequence[Sequence[int]]) -> CanaryReport:
    """Answers `prompts` greedily with the engine's target and drafter and a small KV pool of its own.

    The engine must be idle: the drafter's context is overwritten. Its counters and tables stay as they are.
    """
    assert not engine.has_work(), "the canary needs an idle engine"
    config, block_size = engine.config, engine.config.engine.kv_block_size
    length = min(_MAX_MODEL_LEN, config.model.max_model_len)
    small = config.model_copy(
        update={
            "model": config.model.model_copy(update={"max_model_len": length}),
            "engine": config.engine.model_copy(
                update={"kv_num_blocks": min(engine.pool.num_blocks, len(prompts) * -(-length // block_size))}
            ),
            "speculation": config.speculation.model_copy(
                update={"mode": VerificationMode.FIXED, "fixed_tokens": None}
            ),
        }
    )
    trial = Engine(small, engine.target, engine.drafter, None, SystemClock(), engine_id="canary")
    sampling = SamplingParams(temperature=0.0, max_tokens=min(_MAX_TOKENS, length // 2))
    requests = [Request(str(i), tuple(p)[: length // 2], sampling) for i, p in enumerate(prompts)]
    generate_all(trial, requests, concurrency=min(len(requests), config.engine.max_running))
    return CanaryReport(trial.counters.tau, trial.counters.drafts)


def warn_if_drafter_is_dead(engine: Engine, model_dir: Path) -> CanaryReport | None:
    """Runs the canary where there is a trained drafter and a tokenizer; a loud warning below the floor."""
    if engine.drafter is None or engine.config.speculation.drafter.path is None:
        return None
    try:
        tokenizer = Tokenizer.load(model_dir)
    except ConfigError as error:
        log.warning("the drafter was not tried: %s", error)
        return None
    prompts = [tokenizer.render_chat([{"role": "user", "content": text}]) for text in PROMPTS]
    report = try_drafter(engine, prompts)
    if not report.is_alive:
        log.warning(
            "THE DRAFTER IS NO GOOD FOR THIS TARGET: accepted length %.2f on %d drafts of built-in prompts, "
            "at least %.2f is expected. Output stays correct, but nothing is gained. Was %s trained for this "
            "target, with these taps and this rope_theta, and for long enough?",
            report.tau,
            report.num_drafts,
            FLOOR,
            engine.config.speculation.drafter.path,
        )
    return report
