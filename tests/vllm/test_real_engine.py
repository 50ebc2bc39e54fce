"""The real vLLM behind the adapter, with a tiny random model: it speculates, counts, aborts and dies."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from dspark_ray.core.config import parse_app_config
from dspark_ray.core.errors import EngineDeadError, RequestError
from dspark_ray.core.types import FinishReason, Request, RequestOutput, SamplingParams
from dspark_ray.runtime.engine_factory import vllm_engine
from tests.tiny import tiny_chat_model_dir

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PROMPT = (5, 6, 7, 8) * 6


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    # vLLM's CPU attention knows no smaller heads.
    source = tiny_chat_model_dir(tmp_path_factory.mktemp("model"), head_dim=32)
    config = parse_app_config(
        {
            "model": {"source": str(source), "dtype": "float32", "max_model_len": 256},
            "engine": {"kind": "vllm", "num_threads": 1, "kv_block_size": 32, "kv_num_blocks": 64},
            "speculation": {"drafter": {"kind": "ngram"}, "num_draft_tokens": 3, "mode": "fixed"},
            # Compiling takes minutes and changes nothing that is looked at here.
            "vllm": {"device": "cpu", "engine_args": {"enforce_eager": True}},
        }
    )
    loaded = vllm_engine(config, "engine")
    yield loaded
    loaded.close()
    assert not _cores(), "vLLM's processes outlive the engine"


def _run(engine: Any, *requests: Request) -> dict[str, tuple[list[int], RequestOutput]]:
    for request in requests:
        engine.add_request(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    ends: dict[str, RequestOutput] = {}
    deadline = time.monotonic() + 120
    while len(ends) < len(requests):
        assert time.monotonic() < deadline
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                ends[output.request_id] = output
    return {request_id: (tokens[request_id], end) for request_id, end in ends.items()}


def _cores() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "EngineCore" in " ".join([child.name(), *child.cmdline()])]


def test_it_speculates_counts_and_resumes(loaded: Any) -> None:
    engine = loaded.engine
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    ((tokens, end),) = _run(engine, Request("a", PROMPT, sampling)).values()
    assert end.finish_reason is FinishReason.LENGTH
    assert len(tokens) == 60
    usage = end.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), 60)
    assert usage.drafted_tokens >= usage.accepted_tokens > 0
    counters = engine.stats().counters
    assert counters.drafted_tokens == counters.verified_tokens == usage.drafted_tokens
    assert counters.accepted_tokens == usage.accepted_tokens == sum(counters.accepted_per_position)
    assert counters.emitted_tokens == 60
    assert counters.decode_tokens == 59
    assert counters.tau == pytest.approx(59 / counters.request_steps)
    resumed = _run(engine, Request("b", PROMPT, sampling, emitted_token_ids=tuple(tokens[:20])))
    assert resumed["b"][0] == tokens[20:]


def test_aborts_and_refusals(loaded: Any) -> None:
    engine = loaded.engine
    long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    engine.add_request(Request("gone", PROMPT, long))
    assert engine.abort("gone")
    short = SamplingParams(temperature=0.8, max_tokens=5, ignore_eos=True)
    assert list(_run(engine, Request("kept", PROMPT, short))) == ["kept"]
    with pytest.raises(RequestError) as caught:
        engine.add_request(Request("bad", PROMPT, SamplingParams(temperature=5.0, max_tokens=5)))
    assert caught.value.status == 400
    assert not engine.has_work()


def test_death_is_noticed(loaded: Any) -> None:
    """The last test of this module: nothing runs after it."""
    engine = loaded.engine
    cores = _cores()
    assert cores
    for core in cores:
        os.kill(core.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while not engine.has_work():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(EngineDeadError):
        engine.step()
