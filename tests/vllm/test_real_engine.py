"""The real vLLM behind the adapter, with a tiny random model: it speculates, counts, follows grammars, tells
log-probabilities, aborts and dies; all of it with this program's plugin in its core.
"""

import json
import math
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from dspark_ray.core.config import parse_app_config
from dspark_ray.core.errors import EngineDeadError, RequestError
from dspark_ray.core.types import FinishReason, Request, RequestOutput, SamplingParams, StepPlan
from dspark_ray.models.grammar import GrammarVocabulary
from dspark_ray.models.tokenizer import Tokenizer
from dspark_ray.runtime.engine_factory import vllm_engine
from dspark_ray.vllm_engine.link import PlanLink
from tests.tiny import tiny_chat_model_dir
from tests.tiny_lora import adapter_tensors, merged_deltas, write_adapter
from tests.vllm.conftest import entry_point_dir

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PROMPT = (5, 6, 7, 8) * 6


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # vLLM's CPU attention knows no smaller heads.
    return tiny_chat_model_dir(tmp_path_factory.mktemp("model"), head_dim=32)


@pytest.fixture(scope="module")
def plans() -> Iterator[PlanLink]:
    """Where vLLM's processes find plans. On a CPU no engine has one, for vLLM chooses no budgets there."""
    link = PlanLink("tcp://127.0.0.1")
    yield link
    link.close()


@pytest.fixture(scope="module")
def loaded(source: Path, plans: PlanLink, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    config = parse_app_config(
        {
            "model": {"source": str(source), "dtype": "float32", "max_model_len": 256},
            "engine": {"kind": "vllm", "num_threads": 1, "kv_block_size": 32, "kv_num_blocks": 64},
            "speculation": {"drafter": {"kind": "ngram"}, "num_draft_tokens": 3, "mode": "fixed"},
            "lora": {"load_from": str(source.parent), "max_loaded": 2, "max_rank": 8},
            # Compiling takes minutes and changes nothing that is looked at here.
            "vllm": {"device": "cpu", "engine_args": {"enforce_eager": True}},
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(entry_point_dir(tmp_path_factory.mktemp("plugin")))
        for name, value in plans.addresses.environment().items():
            patch.setenv(name, value)
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
    return [
        child
        for child in children
        if child.status() != psutil.STATUS_ZOMBIE
        and "EngineCor" in " ".join([child.name(), *child.cmdline()])
    ]


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


def test_its_core_listens_for_plans(loaded: Any, plans: PlanLink) -> None:
    """vLLM has found the entry point, and its scheduler's steps go on while plans come."""
    for number in range(20):
        plans.send(StepPlan("r", 1, number, "shared_cap", 100.0))
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    assert len(_run(loaded.engine, Request("planned", PROMPT, sampling))["planned"][0]) == 20
    port = int(plans.addresses.plans.rsplit(":", 1)[1])
    peers = [one.raddr.port for core in _cores() for one in core.net_connections("tcp") if one.raddr]
    assert port in peers


def test_a_text_follows_its_grammar(loaded: Any, source: Path) -> None:
    vocabulary, tokenizer = GrammarVocabulary.load(source), Tokenizer.load(source)
    formats = {
        "[0-9]{3}-[0-9]{4}": {"type": "regex", "pattern": "[0-9]{3}-[0-9]{4}"},
        "left|right": {
            "type": "or",
            "elements": [{"type": "const_string", "value": word} for word in ("left", "right")],
        },
        '"(ab|cd)"': {"type": "json_schema", "json_schema": {"enum": ["ab", "cd"]}},
    }
    sampling = SamplingParams(temperature=1.0, max_tokens=80, stop_token_ids=tokenizer.eos_token_ids)
    requests = []
    for pattern, wanted in formats.items():
        grammar = vocabulary.compile(json.dumps({"type": "structural_tag", "format": wanted}))
        requests.append(Request(pattern, PROMPT, sampling, grammar=grammar))
    for pattern, (tokens, end) in _run(loaded.engine, *requests).items():
        assert re.fullmatch(pattern, tokenizer.decode(tokens, skip_special_tokens=True))
        assert end.finish_reason is FinishReason.STOP
        assert end.usage is not None
        assert end.usage.completion_tokens == len(tokens)


def test_logprobs_are_the_models_own(loaded: Any, source: Path) -> None:
    """Before temperature and penalties, whether a token was drafted or not; the prompt's too."""
    sampling = SamplingParams(
        temperature=0.7, repetition_penalty=1.2, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    loaded.engine.add_request(Request("told", PROMPT, sampling))
    outputs: list[RequestOutput] = []
    while not outputs or outputs[-1].finish_reason is None:
        outputs += loaded.engine.step()
    tokens = [token for output in outputs for token in output.token_ids]
    told = [one for output in outputs for one in output.logprobs]
    prompt = [one for output in outputs for one in output.prompt_logprobs]
    assert (len(told), len(prompt)) == (12, len(PROMPT) - 1)
    expected = _logprobs(source, [*PROMPT, *tokens])
    for place, (token, one) in enumerate(zip([*PROMPT[1:], *tokens], [*prompt, *told], strict=True)):
        assert math.isclose(one.logprob, expected[place, token], abs_tol=2e-3)
        top = expected[place].topk(len(one.top))
        assert [other for other, _ in one.top] == top.indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(top.values.tolist(), abs=2e-3)


def test_an_adapter_is_the_model_with_it_merged(loaded: Any, source: Path, tmp_path: Path) -> None:
    """Beside requests without one, which share its prompt, and after a refused one."""
    sizes = {"self_attn.q_proj": (128, 64), "self_attn.v_proj": (64, 64)}
    tensors = adapter_tensors("attention", sizes)
    adapter = write_adapter(tmp_path, "attention", tensors, target_modules=["q_proj", "v_proj"])
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0)
    with pytest.raises(RequestError, match="cannot serve the adapter 'gone'") as caught:
        loaded.engine.load(replace(adapter, name="gone", digest="gone", path=str(tmp_path / "gone")))
    assert caught.value.code == "invalid_adapter"
    loaded.engine.load(adapter)
    requests = [Request("base", PROMPT, greedy), Request("adapted", PROMPT, greedy, adapter=adapter)]
    told: dict[str, list[float]] = {"base": [], "adapted": []}
    tokens: dict[str, list[int]] = {"base": [], "adapted": []}
    for request in requests:
        loaded.engine.add_request(request)
    while any(len(one) < 16 for one in tokens.values()):
        for output in loaded.engine.step():
            tokens[output.request_id] += output.token_ids
            told[output.request_id] += [one.logprob for one in output.logprobs]
    assert tokens["base"] != tokens["adapted"]
    for name, added in (("base", {}), ("adapted", merged_deltas("attention", tensors))):
        expected = _logprobs(source, [*PROMPT, *tokens[name]], added)[len(PROMPT) - 1 : -1]
        assert expected.argmax(-1).tolist() == tokens[name]
        assert expected.max(-1).values.tolist() == pytest.approx(told[name], abs=2e-3)


def _logprobs(
    source: Path, token_ids: list[int], added: dict[str, torch.Tensor] | None = None
) -> torch.Tensor:
    """Of the model, or of one with something added to its weights; [tokens, vocabulary]."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        for name, delta in (added or {}).items():
            model.get_parameter(name).add_(delta)
        return torch.log_softmax(model(torch.tensor([token_ids])).logits[0], dim=-1)


def test_rules_about_tokens(loaded: Any) -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    first, second = _run(loaded.engine, Request("free", PROMPT, plain))["free"][0][:2]
    rules = {
        "word": replace(plain, bad_words=((first,),)),
        "pair": replace(plain, bad_words=((first, second),)),
        "allowed": replace(plain, allowed_token_ids=(7, 8)),
        "ends": replace(
            plain, ignore_eos=False, min_tokens=4, stop_token_ids=(7, 8), allowed_token_ids=(7, 8, 9)
        ),
    }
    found = _run(loaded.engine, *(Request(name, PROMPT, sampling) for name, sampling in rules.items()))
    tokens = {name: tokens for name, (tokens, _) in found.items()}
    assert first not in tokens["word"]
    assert (first, second) not in list(pairwise(tokens["pair"]))
    assert set(tokens["allowed"]) <= {7, 8}
    assert set(tokens["ends"][:4]) == {9}


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
    with pytest.raises(RequestError, match="not yet supported with speculative decoding"):
        engine.add_request(Request("bad", PROMPT, SamplingParams(logit_bias=((9, 5.0),), max_tokens=5)))
    with pytest.raises(RequestError, match="vLLM drafts for all requests alike"):
        engine.add_request(Request("bad", PROMPT, SamplingParams(max_draft_tokens=0)))
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
