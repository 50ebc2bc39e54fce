"""Training data written by the target itself: it invents user turns and answers them, or answers given ones.

python -m dspark_ray.training.generate OUT.jsonl --minutes 20 [--openings FILE.yaml | --prompts FILE.jsonl]

No external data set: after an open user header, a sampled chat model writes what users write, freely or by
continuing one of the given openings; its answers at the configured temperatures are what the drafter must
predict. Appends complete lines, so it can be stopped and started again at any time.
"""

import argparse
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import yaml
from pydantic import TypeAdapter, ValidationError

from dspark_ray.core.config import AppConfig, EngineConfig, ModelConfig, SpeculationConfig
from dspark_ray.core.errors import ConfigError
from dspark_ray.core.section import Section
from dspark_ray.core.types import Request, RequestOutput, SamplingParams, VerificationMode
from dspark_ray.engine.build import TargetLoader, build_engine
from dspark_ray.engine.engine import Engine
from dspark_ray.models.fetch import resolve_model
from dspark_ray.models.prompts import read_prompts
from dspark_ray.models.tokenizer import Tokenizer
from dspark_ray.observability.progress import progress
from dspark_ray.training.answers import answer_prompts, answered_lines

logger = logging.getLogger(__name__)


class Opening(Section):
    """How a user turn begins, and what is put after the model's continuation."""

    opening: str = ""
    ending: str = ""
    max_tokens: int = 64


def load_openings(path: Path) -> tuple[Opening, ...]:
    """A YAML list of `{opening, ending, max_tokens}`; ConfigError says which entry is wrong."""
    try:
        openings = TypeAdapter(tuple[Opening, ...]).validate_python(yaml.safe_load(path.read_text("utf-8")))
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise ConfigError(f"{path}: no list of openings: {error}") from error
    if not openings:
        raise ConfigError(f"{path}: an empty list of openings")
    return openings


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """How samples are made."""

    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)  # of the answers, in equal shares
    # Of the user turns: at 1.0 a small model's are often gibberish, which no user writes.
    user_temperatures: tuple[float, ...] = (0.6, 0.8, 1.0)
    openings: tuple[Opening, ...] = ()
    free_share: float = 0.25  # of the user turns that have no opening, where openings are given
    max_user_tokens: int = 96
    max_answer_tokens: int = 256
    min_user_chars: int = 8
    concurrency: int = 96
    seed: int = 0


def open_user_header(tokenizer: Tokenizer) -> list[int]:
    """Token ids of the chat template up to where the first user's text begins: what any two share."""
    first, second = (tokenizer.render_chat([{"role": "user", "content": text}]) for text in ("Apples", "zoo"))
    shared = next(i for i, (x, y) in enumerate(zip(first, second, strict=False)) if x != y)
    if shared == 0:
        raise ConfigError("the chat template has no user header: user turns cannot be self-written")
    return first[:shared]


class SelfWriter:
    """Keeps `concurrency` requests in flight; each user turn that ends becomes a request for its answer."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, settings: GenerationSettings) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._settings = settings
        self._rng = np.random.default_rng(settings.seed)
        self._header = tuple(open_user_header(tokenizer))
        self._tokens: dict[str, list[int]] = {}
        self._openings: dict[str, Opening] = {}  # of the user turns in flight, by request id
        self._answers: dict[str, tuple[tuple[int, ...], float]] = {}  # request id → prompt, temperature
        self._count = 0

    def samples(self, keep_going: Callable[[], bool]) -> Iterator[dict[str, object]]:
        """Finished samples until `keep_going()` says no; what is in flight then is dropped."""
        while keep_going():
            while len(self._tokens) < self._settings.concurrency:
                self._start_user_turn()
            for output in self._engine.step():
                yield from self._advance(output)
        for request_id in list(self._tokens):
            self._engine.abort(request_id)

    def _start_user_turn(self) -> None:
        settings = self._settings
        opening = Opening(max_tokens=settings.max_user_tokens)
        if settings.openings and self._rng.random() >= settings.free_share:
            opening = settings.openings[self._rng.integers(len(settings.openings))]
        prompt = self._header
        if opening.opening:
            prompt += tuple(self._tokenizer.encode(opening.opening, add_special_tokens=False))
        temperature = float(self._rng.choice(settings.user_temperatures))
        self._openings[self._submit(prompt, temperature, opening.max_tokens)] = opening

    def _advance(self, output: RequestOutput) -> Iterator[dict[str, object]]:
        self._tokens[output.request_id] += output.token_ids
        if output.finish_reason is None:
            return
        tokens = self._tokens.pop(output.request_id)
        if output.request_id in self._answers:
            prompt, temperature = self._answers.pop(output.request_id)
            yield {"prompt_ids": list(prompt), "response_ids": tokens, "temperature": temperature}
            return
        opening = self._openings.pop(output.request_id)
        user = (opening.opening + self._tokenizer.decode(tokens)).strip()
        if len(user) - len(opening.opening) >= self._settings.min_user_chars:
            user += opening.ending
            prompt = tuple(self._tokenizer.render_chat([{"role": "user", "content": user}]))
            temperature = float(self._rng.choice(self._settings.temperatures))
            request_id = self._submit(prompt, temperature, self._settings.max_answer_tokens)
            self._answers[request_id] = (prompt, temperature)

    def _submit(self, prompt: tuple[int, ...], temperature: float, max_tokens: int) -> str:
        request_id = str(self._count)
        self._count += 1
        seed = int(self._rng.integers(2**62))
        sampling = SamplingParams(
            temperature=temperature, max_tokens=max_tokens, seed=seed, shared_noise=False
        )
        self._engine.add_request(Request(request_id, prompt, sampling))
        self._tokens[request_id] = []
        return request_id


@dataclass(slots=True)
class Written:
    """How much a run has appended so far."""

    num_samples: int = 0
    num_tokens: int = 0  # of answers

    def __str__(self) -> str:
        return f"{self.num_samples:,} texts, {self.num_tokens:,} answer tokens"


def write_samples(out: Path, samples: Iterator[dict[str, object]], written: Written | None = None) -> Written:
    """Appends samples to `out`, and counts them in `written` while it goes."""
    out.parent.mkdir(parents=True, exist_ok=True)
    written = written or Written()
    with out.open("a", encoding="utf-8") as file:
        for sample in samples:
            file.write(json.dumps(sample) + "\n")
            file.flush()
            response = sample["response_ids"]
            assert isinstance(response, list)
            written.num_samples += 1
            written.num_tokens += len(response)
    return written


def _report(message: str) -> None:
    logger.warning("skipped %s", message)


class Ranks(Protocol):
    """Other processes that share the target."""

    @property
    def load(self) -> TargetLoader: ...

    def close(self) -> None: ...


StartRanks = Callable[[AppConfig, Path], Ranks | None]
"""(config, model directory) → the other ranks, where there are any."""


def main(arguments: Sequence[str] | None = None, start_ranks: StartRanks | None = None) -> None:
    """Command line of this module; see its docstring. Without `start_ranks`, one process has the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="default", help="'default', a directory or a hub id")
    parser.add_argument("--openings", type=Path, help="YAML list of {opening, ending, max_tokens}")
    parser.add_argument("--prompts", type=Path, help="answer these JSON lines instead")
    parser.add_argument("--bad-data", choices=("skip", "stop"), default="skip", help="of the prompts")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--concurrency", type=int, default=96)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads or max(1, torch.get_num_threads() // options.ranks))
    model_dir = resolve_model(options.model)
    openings = load_openings(options.openings) if options.openings else ()
    settings = GenerationSettings(concurrency=options.concurrency, seed=options.seed, openings=openings)
    config = AppConfig(
        model=ModelConfig(max_model_len=1024),
        engine=EngineConfig(
            max_running=settings.concurrency,
            kv_num_blocks=settings.concurrency * 64,
            tensor_parallel_size=options.ranks,
        ),
        speculation=SpeculationConfig(mode=VerificationMode.OFF),
    )
    tokenizer, began, limit_s = Tokenizer.load(model_dir), time.monotonic(), options.minutes * 60
    on_bad_line = _report if options.bad_data == "skip" else None
    prompts = []
    if options.prompts is not None:
        prompts = read_prompts(options.prompts, tokenizer, on_bad_line=on_bad_line)
    ranks = None if start_ranks is None else start_ranks(config, model_dir)
    engine = build_engine(config, model_dir=model_dir, load=None if ranks is None else ranks.load)

    written = Written()
    with progress(f"writing {options.out}") as tell:

        def keep_going() -> bool:
            passed_s = time.monotonic() - began
            tell(min(1.0, passed_s / limit_s), str(written))
            return passed_s < limit_s

        if options.prompts is None:
            samples = SelfWriter(engine, tokenizer, settings).samples(keep_going)
        else:
            answered = answered_lines(options.out)
            samples = answer_prompts(
                engine,
                [prompt for prompt in prompts if prompt.line not in answered],
                temperatures=settings.temperatures,
                max_tokens=settings.max_answer_tokens,
                seed=settings.seed,
                concurrency=settings.concurrency,
                keep_going=keep_going,
                on_bad_line=on_bad_line,
            )
        write_samples(options.out, samples, written)
    print(f"{written} written to {options.out}", flush=True)
    if ranks is not None:
        ranks.close()


if __name__ == "__main__":
    main()
