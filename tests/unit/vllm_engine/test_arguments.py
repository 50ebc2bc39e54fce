"""Our configuration in vLLM's words; no vLLM needed."""

from dataclasses import dataclass
from typing import Any

import pytest

from dspark_ray.core.config import AppConfig, parse_app_config
from dspark_ray.core.errors import ConfigError, RequestError
from dspark_ray.core.types import CompiledGrammar, Priority, Request, SamplingParams, ServiceTier
from dspark_ray.vllm_engine import version
from dspark_ray.vllm_engine.arguments import engine_arguments
from dspark_ray.vllm_engine.sampling import sampling_arguments
from dspark_ray.vllm_engine.speculation import speculative_config
from dspark_ray.vllm_engine.version import is_tested, require_vllm


def config(speculation: dict[str, Any] | None = None, **sections: Any) -> AppConfig:
    return parse_app_config({"engine": {"kind": "vllm"}, "speculation": speculation or {}, **sections})


def mapped(request: Request) -> dict[str, Any]:
    return sampling_arguments(request, num_draft_tokens=5)


def speculates(kind: str, mode: str = "fixed", **drafter: Any) -> dict[str, Any]:
    return {"drafter": {"kind": kind, **drafter}, "num_draft_tokens": 5, "mode": mode}


SAMPLES = {"draft_sample_method": "probabilistic"}


@pytest.mark.parametrize(
    ("speculation", "expected"),
    [
        (speculates("none"), None),
        (speculates("ngram", "off"), None),
        (speculates("ngram"), {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}),
        (speculates("medusa", path="/m"), {"method": "medusa", "model": "/m"}),
        (speculates("mtp"), {"method": "mtp", **SAMPLES}),
        (speculates("eagle3", hub_id="a/b"), {"method": "eagle3", "model": "a/b", **SAMPLES}),
        (
            speculates("dflash", hub_id="a/b@v1"),
            {"method": "dflash", "model": "a/b", "revision": "v1", **SAMPLES},
        ),
        (speculates("draft_model", path="/small"), {"method": "draft_model", "model": "/small", **SAMPLES}),
        (speculates("dspark", path="/d"), {"method": "dspark", "model": "/d", **SAMPLES}),
        (
            speculates("dspark", "adaptive"),  # from the target's checkpoint
            {"method": "dspark", "enable_adaptive_verification": True, **SAMPLES},
        ),
    ],
)
def test_one_speculation_section(speculation: dict[str, Any], expected: dict[str, Any] | None) -> None:
    found = speculative_config(config(speculation))
    assert found == (None if expected is None else {"num_speculative_tokens": 5, **expected})


def test_fixed_tokens_and_arguments_of_its_own() -> None:
    changed = speculates("dspark", path="/d") | {"fixed_tokens": 3}
    vllm = {"draft_sample_method": "greedy", "speculative_args": {"moe_backend": "triton"}}
    found = speculative_config(config(changed, vllm=vllm))
    assert found is not None
    assert found["num_speculative_tokens"] == 3
    assert (found["draft_sample_method"], found["moe_backend"]) == ("greedy", "triton")


def test_a_cpu_drafts_greedily() -> None:
    found = speculative_config(config(speculates("eagle3", path="/e"), vllm={"device": "cpu"}))
    assert found is not None
    assert "draft_sample_method" not in found


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        (speculates("ngram", "adaptive"), "with drafter kind dspark only"),
        (speculates("dspark", "threshold", path="/d"), "off, fixed and adaptive"),
        (speculates("ngram") | {"fixed_tokens": 0}, "set speculation.mode to off"),
    ],
)
def test_modes_that_vllm_has_not(speculation: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        speculative_config(config(speculation))


def test_engine_arguments() -> None:
    args = engine_arguments(
        config(
            model={"id": "m", "max_model_len": 4096},
            engine={"kind": "vllm", "max_running": 8, "max_step_rows": 64, "kv_num_blocks": 300},
            vllm={"tensor_parallel_size": 2, "executor": "ray", "engine_args": {"kv_cache_dtype": "fp8"}},
        ),
        "owner/name@v2",
    )
    assert (args["model"], args["revision"], args["tokenizer_revision"]) == ("owner/name", "v2", "v2")
    assert (args["max_num_seqs"], args["max_num_batched_tokens"], args["max_model_len"]) == (8, 64, 4096)
    assert (args["tensor_parallel_size"], args["distributed_executor_backend"]) == (2, "ray")
    assert args["num_gpu_blocks_override"] == 300
    assert args["kv_cache_dtype"] == "fp8"
    assert args["speculative_config"] is None
    assert "per_request_spec_decode_metrics" not in args  # vLLM takes it with speculation only


def test_adapters() -> None:
    args = engine_arguments(config(lora={"load_from": "x", "max_loaded": 3, "max_rank": 20}), "owner/name")
    assert (args["enable_lora"], args["max_loras"], args["max_cpu_loras"]) == (True, 3, 3)
    assert args["max_lora_rank"] == 32  # vLLM knows some ranks only
    with pytest.raises(ConfigError, match=r"lora\.max_rank 600: vLLM takes at most 512"):
        engine_arguments(config(lora={"load_from": "x", "max_rank": 600}), "owner/name")


def test_memory_is_a_share_or_a_number_of_blocks() -> None:
    args = engine_arguments(config(vllm={"gpu_memory_utilization": 0.5}), "/a/directory@with-an-at")
    assert args["gpu_memory_utilization"] == 0.5
    assert "num_gpu_blocks_override" not in args
    assert args["model"] == "/a/directory@with-an-at"
    assert "revision" not in args


def test_sampling() -> None:
    sampling = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        min_p=0.1,
        seed=3,
        max_tokens=10,
        min_tokens=4,
        stop_token_ids=(5, 6),
        ignore_eos=True,
        repetition_penalty=1.1,
        logit_bias=((4, -1.0),),
        allowed_token_ids=(4, 5),
        logprobs=3,
        prompt_logprobs=0,
    )
    found = mapped(Request("r", (1, 2), sampling, emitted_token_ids=(7, 8, 9)))
    assert found == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.1,
        "seed": 3,
        "max_tokens": 7,  # three of ten are emitted
        "min_tokens": 1,
        "stop_token_ids": [5, 6],
        "ignore_eos": True,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.1,
        "logit_bias": {4: -1.0},
        "allowed_token_ids": [4, 5],
        "logprobs": 3,
        "prompt_logprobs": None,  # they were sent before
        "detokenize": False,
    }
    first = mapped(Request("r", (1, 2), sampling))
    assert (first["max_tokens"], first["prompt_logprobs"]) == (10, 0)


@pytest.mark.parametrize(
    ("sampling", "grammar", "named"),
    [
        (SamplingParams(presence_penalty=0.5), None, "penalties"),
        (SamplingParams(bad_words=((4, 5),)), None, "bad_words"),
        (SamplingParams(), CompiledGrammar("digest", "{}", "{}"), "the constraint of its text"),
    ],
)
def test_what_begins_anew_is_not_continued(
    sampling: SamplingParams, grammar: CompiledGrammar | None, named: str
) -> None:
    mapped(Request("r", (1,), sampling, grammar=grammar))
    with pytest.raises(RequestError, match=rf"cannot be continued \({named}\)") as caught:
        mapped(Request("r", (1,), sampling, emitted_token_ids=(2,), grammar=grammar))
    assert (caught.value.status, caught.value.code) == (503, "cannot_resume")


def test_what_looks_at_one_token_is_continued() -> None:
    sampling = SamplingParams(bad_words=((4,),), repetition_penalty=1.1, logprobs=2)
    assert mapped(Request("r", (1,), sampling, emitted_token_ids=(2,)))["logprobs"] == 2


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=1e-6), SamplingParams(top_k=1)])
def test_what_is_greedy_here_is_greedy_there(sampling: SamplingParams) -> None:
    assert mapped(Request("r", (1,), sampling))["temperature"] == 0.0


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("speculation", Request("r", (1,), SamplingParams(max_draft_tokens=4))),
        (
            "target_tokens_per_second",
            Request("r", (1,), SamplingParams(), priority=Priority(target_tokens_per_s=9.0)),
        ),
    ],
)
def test_a_parameter_without_a_counterpart_is_refused(name: str, request_: Request) -> None:
    with pytest.raises(RequestError, match=f"'{name}' is not supported by this server's engine") as caught:
        mapped(request_)
    assert (caught.value.status, caught.value.param) == (400, name)


def test_every_sampling_parameter_is_mapped_or_refused() -> None:
    """A new one must not be left out in silence."""

    @dataclass(frozen=True)
    class Newer(SamplingParams):
        mirostat: float = 0.0

    mapped(Request("r", (1,), Newer()))
    with pytest.raises(RequestError, match=r"'mirostat' is not supported .* no such parameter"):
        mapped(Request("r", (1,), Newer(mirostat=1.0)))


def test_a_limit_that_limits_nothing_is_none() -> None:
    assert mapped(Request("r", (1,), SamplingParams(max_draft_tokens=5)))
    assert sampling_arguments(Request("r", (1,), SamplingParams(max_draft_tokens=0)), 0)


def test_a_place_in_the_queue_is_vllms_own_priority() -> None:
    assert mapped(Request("r", (1,), SamplingParams(), priority=Priority(ServiceTier.FLEX, level=-3)))
    assert engine_arguments(config(), "owner/name")["scheduling_policy"] == "priority"
    levels = [Priority(tier).queue_level for tier in ("flex", "default", "priority")]  # type: ignore[arg-type]
    assert levels == sorted(levels, reverse=True)  # to vLLM, too, the lower goes first


@pytest.mark.parametrize(
    ("text", "known"),
    [("0.32.0", True), ("0.33.1.post1", True), ("0.32.0+cpu", True), ("0.31.9", False), ("0.3", False)],
)
def test_versions(text: str, known: bool) -> None:
    assert is_tested(text) is known


def test_the_version_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "installed_version", lambda: "0.40.0")
    with pytest.raises(ConfigError, match=r"vLLM 0\.40\.0 is installed; this adapter is made for 0\.32 or"):
        require_vllm()
    monkeypatch.setattr(version, "installed_version", lambda: None)
    with pytest.raises(ConfigError, match=r"vLLM is not installed: install version .* or set engine\.kind"):
        require_vllm()
    monkeypatch.setattr(version, "installed_version", lambda: "0.33.0")
    assert require_vllm() == "0.33.0"
