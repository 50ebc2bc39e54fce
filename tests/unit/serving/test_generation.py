"""A choice survives the death of what runs it: each token once, in order."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from dspark_ray.core.config import parse_app_config
from dspark_ray.core.errors import EngineDeadError, QueueFullError, RequestError
from dspark_ray.core.types import FinishReason, Request, RequestOutput, RequestUsage, SamplingParams
from dspark_ray.serving.generation import Generation, RetryPolicy, StepError
from tests.fakes import POISON_TOKEN, FakeEngine, LocalServer, echo

PROMPT = (11, 12, 13, 14, 15)
CONFIG = parse_app_config({"model": {"max_model_len": 64}, "engine": {"max_waiting": 1, "max_running": 1}})
FAST = RetryPolicy(backoff_s=(0.0,), tail_timeout_s=0.01)


def server(*deaths: int) -> LocalServer:
    return LocalServer(FakeEngine(CONFIG, step_ms=0.0), deaths)


def request(max_tokens: int = 20, prompt: tuple[int, ...] = PROMPT) -> Request:
    return Request("r", prompt, SamplingParams(max_tokens=max_tokens))


async def collect(generation: Generation) -> list[RequestOutput]:
    return [output async for output in generation.outputs()]


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def settle(local: LocalServer) -> None:
    """Cancelled calls end in the loop's next turns; then nothing may be left."""
    for _ in range(5):
        await asyncio.sleep(0)
    assert local.is_idle


EXPECTED = [echo(PROMPT, position) for position in range(20)]


async def test_without_trouble_there_is_one_attempt() -> None:
    local = server()
    outputs = await collect(Generation(request(), local, local, FAST))
    assert tokens(outputs) == EXPECTED
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert len(local.submitted) == 1
    await settle(local)


@pytest.mark.parametrize("deaths", [(1,), (3,), (2, 4, 5), (7,)])
async def test_no_token_is_lost_or_doubled_when_engines_die(deaths: tuple[int, ...]) -> None:
    local = server(*deaths)
    outputs = await collect(Generation(request(), local, local, FAST))
    assert tokens(outputs) == EXPECTED
    assert len(local.submitted) == 1 + len(deaths)
    assert len({attempt.request_id for attempt in local.submitted}) == len(local.submitted)
    assert (
        list(local.submitted[-1].emitted_token_ids) == EXPECTED[: len(local.submitted[-1].emitted_token_ids)]
    )
    assert outputs[-1].usage is not None
    assert outputs[-1].usage.completion_tokens == 20
    await settle(local)


async def test_it_gives_up_after_the_last_attempt() -> None:
    local = server(*range(1, 100))
    with pytest.raises(EngineDeadError):
        await collect(Generation(request(), local, local, FAST))
    assert len(local.submitted) == FAST.max_attempts
    await settle(local)


async def test_a_request_that_breaks_steps_is_tried_twice_only() -> None:
    local = server()
    with pytest.raises(StepError, match="poisoned"):
        await collect(Generation(request(prompt=(POISON_TOKEN,)), local, local, FAST))
    assert len(local.submitted) == 2
    await settle(local)


async def test_refusals_are_not_retried() -> None:
    local = server()
    with pytest.raises(RequestError):
        await collect(Generation(request(max_tokens=1000), local, local, FAST))
    for name in ("a", "b"):
        local.engine.add_request(Request(name, PROMPT, SamplingParams()))
    with pytest.raises(QueueFullError):
        await collect(Generation(request(), local, local, FAST))
    assert len(local.submitted) == 2


async def test_leaving_early_aborts() -> None:
    local = server()
    async with aclosing(Generation(request(), local, local, FAST).outputs()) as outputs:
        await anext(outputs)
    await settle(local)


async def test_abort_ends_with_the_usage_so_far() -> None:
    local = server()
    generation = Generation(request(), local, local, FAST)
    outputs = []
    async for output in generation.outputs():
        outputs.append(output)
        if len(outputs) == 2:
            generation.abort()
    assert outputs[-1].finish_reason is FinishReason.ABORT
    assert outputs[-1].usage is not None
    assert outputs[-1].usage.prompt_tokens == len(PROMPT)


class _Scripted(LocalServer):
    """The call's end overtakes the tokens: they come late, or never."""

    def __init__(self, late: list[RequestOutput], final: RequestOutput) -> None:
        super().__init__(FakeEngine(CONFIG, step_ms=0.0))
        self._late, self._final = late, final

    async def submit(self, request: Request) -> RequestOutput:
        self.submitted.append(request)
        for output in self._late:
            asyncio.get_running_loop().call_later(0.002, self._streams[request.request_id].put_nowait, output)
        return self._final


def _output(token_ids: tuple[int, ...], reason: FinishReason | None = None) -> RequestOutput:
    return RequestOutput("r.1", token_ids, reason, RequestUsage(completion_tokens=2) if reason else None)


async def test_tokens_that_come_after_the_calls_end_still_count() -> None:
    local = _Scripted([_output((1,)), _output((2,), FinishReason.LENGTH)], _output((), FinishReason.LENGTH))
    outputs = await collect(Generation(request(2), local, local, RetryPolicy(tail_timeout_s=1.0)))
    assert tokens(outputs) == [1, 2]
    assert len(local.submitted) == 1


async def test_the_calls_end_is_the_backup_of_a_lost_final_output() -> None:
    local = _Scripted([_output((1, 2))], _output((), FinishReason.STOP))
    outputs = await collect(Generation(request(5), local, local, FAST))
    assert tokens(outputs) == [1, 2]
    assert outputs[-1].finish_reason is FinishReason.STOP


async def test_lost_tokens_are_generated_again() -> None:
    local = _Scripted([_output((1,))], _output((), FinishReason.STOP))
    outputs = await collect(Generation(request(9), local, local, FAST))
    assert [attempt.emitted_token_ids for attempt in local.submitted] == [(), (1,)]
    assert tokens(outputs) == [1, 1]
    assert outputs[-1].finish_reason is FinishReason.STOP


async def test_a_gap_in_the_tokens_starts_another_attempt() -> None:
    class Gap(LocalServer):
        def open(self, request_id: str) -> asyncio.Queue[Any]:
            items = super().open(request_id)
            if request_id == "r.1":
                items.put_nowait(EngineDeadError("tokens were lost on the way"))
            return items

    local = Gap(FakeEngine(CONFIG, step_ms=0.0))
    outputs = await collect(Generation(request(), local, local, FAST))
    assert tokens(outputs) == EXPECTED


async def test_an_engine_that_stops_is_not_the_requests_fault() -> None:
    """A drained replica ends its requests with an error: they go on elsewhere, however often."""

    class Draining(LocalServer):
        def _die(self) -> None:
            for request_id in list(self._ends):
                self._deliver(RequestOutput(request_id, (), FinishReason.ERROR, error="the engine stopped"))

    local = Draining(FakeEngine(CONFIG, step_ms=0.0), (1, 2, 3))
    assert tokens(await collect(Generation(request(), local, local, FAST))) == EXPECTED
    assert len(local.submitted) == 4
    await settle(local)
