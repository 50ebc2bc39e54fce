"""The compiling process may hang, crash or refuse: its client gets an error, the next one an answer."""

import asyncio
import sys
from collections.abc import AsyncIterator

import pytest

from dspark_ray.core.errors import QueueFullError, RequestError
from dspark_ray.serving.grammar_compiler import MAX_REFUSED, MAX_WAITING, GrammarCompiler

WORKER = """
import json, sys, time
print(json.dumps({"ready": True}), flush=True)
for number, line in enumerate(sys.stdin):
    tag = json.loads(line)["tag"]
    if tag == "hang":
        time.sleep(60)
    if tag == "crash":
        sys.exit(3)
    answer = {"error": "no grammar"} if tag == "wrong" else {"digest": tag, "compiled": f"{tag} {number}"}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
async def compiler() -> AsyncIterator[GrammarCompiler]:
    compiler = GrammarCompiler((sys.executable, "-S", "-c", WORKER), timeout_s=20.0)
    yield compiler
    await compiler.close()


async def test_equal_grammars_are_compiled_once(compiler: GrammarCompiler) -> None:
    first = await asyncio.gather(*(compiler.compile("a") for _ in range(5)))
    assert {grammar.compiled for grammar in first} == {"a 0"}
    assert (await compiler.compile("b")).compiled == "b 1"
    assert (await compiler.compile("a")).compiled == "a 0"


async def test_a_refusal_is_the_clients_error(compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match="no grammar") as caught:
        await compiler.compile("wrong")
    assert (caught.value.status, caught.value.code) == (400, "invalid_grammar")


async def test_a_crash_costs_one_request(compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match="cannot be compiled"):
        await compiler.compile("crash")
    assert (await compiler.compile("a")).compiled == "a 0"  # of a new process


async def test_what_takes_too_long_is_ended() -> None:
    compiler = GrammarCompiler((sys.executable, "-S", "-c", WORKER), timeout_s=0.5)
    await compiler._started()
    with pytest.raises(RequestError, match=r"longer than 0\.5 s"):
        await compiler.compile("hang")
    assert compiler._worker is None
    await compiler.close()


async def test_who_leaves_does_not_shift_the_answers(compiler: GrammarCompiler) -> None:
    await compiler.compile("a")
    leaving = asyncio.ensure_future(compiler.compile("b"))
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await compiler.compile("c")).digest == "c"
    assert (await compiler.compile("b")).compiled == "b 1"  # it was compiled all the same


async def test_nothing_is_compiled_for_who_left_before_their_turn(compiler: GrammarCompiler) -> None:
    first = asyncio.ensure_future(compiler.compile("a"))
    leaving = asyncio.ensure_future(compiler.compile("b"))
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await compiler.compile("c")).compiled == "c 1"
    assert (await first).compiled == "a 0"


async def test_too_many_that_wait_are_refused(compiler: GrammarCompiler) -> None:
    waiting = [asyncio.ensure_future(compiler.compile(str(number))) for number in range(MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError):
        await compiler.compile("one more")
    assert [grammar.digest for grammar in await asyncio.gather(*waiting)] == [
        str(n) for n in range(MAX_WAITING)
    ]


async def test_a_worker_that_does_not_start_is_no_fault_of_the_client() -> None:
    compiler = GrammarCompiler((sys.executable, "-S", "-c", "pass"), timeout_s=5.0)
    with pytest.raises(RuntimeError, match="does not start"):
        await compiler.compile("a")


async def test_closing_ends_what_waits_and_starts_nothing() -> None:
    compiler = GrammarCompiler((sys.executable, "-S", "-c", WORKER), timeout_s=20.0)
    waiting = [asyncio.ensure_future(compiler.compile(tag)) for tag in ("hang", "a", "b")]
    await asyncio.sleep(0.05)
    await compiler.close()
    hanging, *others = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(hanging, asyncio.CancelledError)
    assert [type(end) for end in others] == [QueueFullError] * 2
    assert compiler._worker is None


async def test_a_bad_grammar_is_not_tried_again_at_once(compiler: GrammarCompiler) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match="cannot be compiled"):
            await compiler.compile("crash")
        assert compiler._worker is None  # no other process was started for it
    for number in range(MAX_REFUSED):
        compiler._refuse(str(number), RequestError("no", code="invalid_grammar"))
    assert len(compiler._refused) == MAX_REFUSED


async def test_nobody_waits_for_long_behind_other_peoples_bombs() -> None:
    compiler = GrammarCompiler((sys.executable, "-S", "-c", WORKER), timeout_s=0.5, max_wait_s=0.1)
    await compiler._started()
    bomb = asyncio.ensure_future(compiler.compile("hang"))
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match="try again later"):
        await compiler.compile("a")
    with pytest.raises(RequestError, match="longer than"):
        await bomb
    await compiler.close()
