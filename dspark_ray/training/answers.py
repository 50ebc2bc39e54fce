"""Training data from given prompts: the target answers them, at each of several temperatures in turn.

Resumable: each line of the output says which line of the prompts file it answers; answered ones are skipped.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dspark_ray.core.errors import ConfigError, RequestError
from dspark_ray.core.types import FinishReason, Request, SamplingParams
from dspark_ray.engine.engine import Engine
from dspark_ray.models.prompts import OnBadLine, Prompt
from dspark_ray.training.data import MIN_RESPONSE


def answered_lines(out: Path) -> set[int]:
    """Lines of the prompts file that `out` has answers to; none if it does not exist.

    An unfinished last line (a killed process's) is cut off, so that appending goes on after it.
    """
    if not out.exists():
        return set()
    content = out.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with out.open("r+b") as file:
            file.truncate(len(whole))
    try:
        records = [json.loads(line) for line in whole.splitlines() if line.strip()]
        return {int(record["prompt_line"]) for record in records if "prompt_line" in record}
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{out} is no file of training samples: {error}") from error


def _bad(message: str, on_bad_line: OnBadLine | None) -> None:
    if on_bad_line is None:
        raise ConfigError(message)
    on_bad_line(message)


def answer_prompts(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    temperatures: Sequence[float],
    max_tokens: int,
    seed: int,
    concurrency: int,
    keep_going: Callable[[], bool],
    on_bad_line: OnBadLine | None = None,
) -> Iterator[dict[str, object]]:
    """Samples in the order in which answers end. Line i of the file is answered at temperature i mod n.

    Stops early when `keep_going()` says no; what is in flight then is dropped. A prompt that can never run
    raises `ConfigError` with its line, or is left out where `on_bad_line` is told; so is an empty answer.
    """
    waiting = iter(prompts)
    flying: dict[str, tuple[Prompt, float, list[int]]] = {}
    try:
        while keep_going():
            while len(flying) < concurrency and (prompt := next(waiting, None)) is not None:
                temperature = temperatures[prompt.line % len(temperatures)]
                sampling = SamplingParams(
                    temperature=temperature,
                    max_tokens=max_tokens,
                    seed=seed + prompt.line,
                    shared_noise=False,
                )
                try:
                    engine.add_request(Request(str(prompt.line), prompt.token_ids, sampling))
                except RequestError as error:
                    _bad(f"line {prompt.line} of the prompts: {error.message}", on_bad_line)
                    continue
                flying[str(prompt.line)] = (prompt, temperature, [])
            if not flying:
                return
            for output in engine.step():
                prompt, temperature, tokens = flying[output.request_id]
                tokens += output.token_ids
                if output.finish_reason is not None:
                    del flying[output.request_id]
                    if output.finish_reason is FinishReason.ERROR or len(tokens) < MIN_RESPONSE:
                        _bad(f"line {prompt.line} of the prompts has no answer", on_bad_line)
                        continue
                    yield {
                        "prompt_ids": list(prompt.token_ids),
                        "response_ids": tokens,
                        "temperature": temperature,
                        "prompt_line": prompt.line,
                    }
    finally:
        for request_id in flying:
            engine.abort(request_id)
