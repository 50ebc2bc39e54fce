"""vLLM's outputs read: log-probabilities, ends."""

from types import SimpleNamespace
from typing import Any

from dspark_ray.core.types import FinishReason, Request, SamplingParams, TokenLogprobs
from dspark_ray.vllm_engine.outputs import OutputReader


def place(first: int, **ranked: float) -> dict[int, Any]:
    """`t5=-0.1` in their order: rank 1, 2, ...; the token that stands there comes first."""
    found = {
        int(name[1:]): SimpleNamespace(logprob=value, rank=rank)
        for rank, (name, value) in enumerate(ranked.items(), start=1)
    }
    return {first: found.pop(first), **found}


def output(*token_ids: int, logprobs: Any = None, prompt: Any = None, finish: str | None = None) -> Any:
    completion = SimpleNamespace(
        token_ids=list(token_ids), finish_reason=finish, spec_decode_metrics=None, logprobs=logprobs
    )
    return SimpleNamespace(outputs=[completion], num_cached_tokens=0, prompt_logprobs=prompt)


def test_the_token_that_stands_there_is_among_the_top_only_by_its_rank() -> None:
    reader = OutputReader(Request("r", (1, 2), SamplingParams(logprobs=2)))
    places = [place(5, t5=-0.1, t6=-2.5), place(9, t7=-0.5, t8=-1.5, t9=-4.0)]
    read = reader.read(output(5, 9, logprobs=places))
    assert read.logprobs == (
        TokenLogprobs(-0.1, ((5, -0.1), (6, -2.5))),
        TokenLogprobs(-4.0, ((7, -0.5), (8, -1.5))),
    )


def test_without_alternatives_and_without_logprobs() -> None:
    reader = OutputReader(Request("r", (1,), SamplingParams(logprobs=0)))
    assert reader.read(output(5, logprobs=[place(5, t5=-0.1)])).logprobs == (TokenLogprobs(-0.1),)
    assert OutputReader(Request("r", (1,), SamplingParams())).read(output(5)).logprobs == ()


def test_a_prompts_come_once_and_without_its_first_place() -> None:
    sampling = SamplingParams(logprobs=1, prompt_logprobs=1)
    prompt = [None, place(2, t2=-0.2, t4=-3.0)]
    first = OutputReader(Request("r", (1, 2), sampling)).read(
        output(5, logprobs=[place(5, t5=-0.1)], prompt=prompt)
    )
    assert first.prompt_logprobs == (TokenLogprobs(-0.2, ((2, -0.2),)),)
    resumed = OutputReader(Request("r", (1, 2), sampling, emitted_token_ids=(5,)))
    assert resumed.read(output(6, logprobs=[place(6, t6=-0.1)], prompt=prompt)).prompt_logprobs == ()


def test_ends() -> None:
    for word, reason in (("stop", FinishReason.STOP), ("length", FinishReason.LENGTH)):
        read = OutputReader(Request("r", (1, 2), SamplingParams())).read(output(5, finish=word))
        assert (read.finish_reason, read.error) == (reason, "")
        assert read.usage is not None
        assert (read.usage.prompt_tokens, read.usage.completion_tokens) == (2, 1)
    read = OutputReader(Request("r", (1,), SamplingParams())).read(output(finish="error"))
    assert (read.finish_reason, read.error) == (FinishReason.ERROR, "vLLM ended it: error")
