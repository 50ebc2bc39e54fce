"""Training data written by the target itself: it invents user turns, then answers them.

python -m dspark_ray.training.generate OUT.jsonl --minutes 20 [--model default] [--concurrency 96]

No external data set: after an open user header, a chat model sampled at temperature 1 writes what users
write; its answers at the configured temperatures are what the drafter must predict. Appends complete
lines, so it can be stopped and started again at any time.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dspark_ray.core.config import AppConfig, EngineConfig, ModelConfig, SpeculationConfig
from dspark_ray.core.errors import ConfigError
from dspark_ray.core.types import Request, RequestOutput, SamplingParams, VerificationMode
from dspark_ray.engine.build import build_engine
from dspark_ray.engine.engine import Engine
from dspark_ray.models.fetch import resolve_model
from dspark_ray.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """How samples are made."""

    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)  # of the answers, in equal shares
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
        self._answers: dict[str, tuple[tuple[int, ...], float]] = {}  # request id → prompt, temperature
        self._count = 0

    def samples(self, keep_going: Callable[[], bool]) -> Iterator[dict[str, object]]:
        """Finished samples until `keep_going()` says no; what is in flight then is dropped."""
        while keep_going():
            while len(self._tokens) < self._settings.concurrency:
                self._submit(self._header, 1.0, self._settings.max_user_tokens)
            for output in self._engine.step():
                yield from self._advance(output)
        for request_id in list(self._tokens):
            self._engine.abort(request_id)

    def _advance(self, output: RequestOutput) -> Iterator[dict[str, object]]:
        self._tokens[output.request_id] += output.token_ids
        if output.finish_reason is None:
            return
        tokens = self._tokens.pop(output.request_id)
        if output.request_id in self._answers:
            prompt, temperature = self._answers.pop(output.request_id)
            yield {"prompt_ids": list(prompt), "response_ids": tokens, "temperature": temperature}
            return
        user = self._tokenizer.decode(tokens).strip()
        if len(user) >= self._settings.min_user_chars:
            prompt = tuple(self._tokenizer.render_chat([{"role": "user", "content": user}]))
            temperature = float(self._rng.choice(self._settings.temperatures))
            request_id = self._submit(prompt, temperature, self._settings.max_answer_tokens)
            self._answers[request_id] = (prompt, temperature)

    def _submit(self, prompt: tuple[int, ...], temperature: float, max_tokens: int) -> str:
        request_id = str(self._count)
        self._count += 1
        seed = int(self._rng.integers(2**62))
        sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
        self._engine.add_request(Request(request_id, prompt, sampling))
        self._tokens[request_id] = []
        return request_id


def write_samples(out: Path, writer: SelfWriter, minutes: float, report_every_s: float = 20.0) -> None:
    """Appends samples to `out` for `minutes`, with a progress line now and then."""
    out.parent.mkdir(parents=True, exist_ok=True)
    started = last = time.monotonic()
    num_samples = num_tokens = 0
    with out.open("a", encoding="utf-8") as file:
        for sample in writer.samples(lambda: time.monotonic() - started < minutes * 60):
            file.write(json.dumps(sample) + "\n")
            file.flush()
            num_samples += 1
            response = sample["response_ids"]
            assert isinstance(response, list)
            num_tokens += len(response)
            now = time.monotonic()
            if now - last > report_every_s:
                last = now
                rate = num_tokens / (now - started)
                print(f"{num_samples} samples, {num_tokens} answer tokens, {rate:.0f} tokens/s", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this module; see its docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="default", help="'default', a directory or a hub id")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--concurrency", type=int, default=96)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    model_dir = resolve_model(options.model)
    settings = GenerationSettings(concurrency=options.concurrency, seed=options.seed)
    config = AppConfig(
        model=ModelConfig(max_model_len=1024),
        engine=EngineConfig(max_running=settings.concurrency, kv_num_blocks=settings.concurrency * 64),
        speculation=SpeculationConfig(mode=VerificationMode.OFF),
    )
    engine = build_engine(config, model_dir=model_dir)
    write_samples(options.out, SelfWriter(engine, Tokenizer.load(model_dir), settings), options.minutes)


if __name__ == "__main__":
    main()
