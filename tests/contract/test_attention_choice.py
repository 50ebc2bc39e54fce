"""Which attention a target gets: pretended libraries with pretended times, and texts with each of them."""

import itertools
import logging
from collections.abc import Callable

import pytest
import torch
from dspark_kernels.attention import PagedBatch, paged_attention
from dspark_kernels.attention_libraries import AttentionShape, LibraryError, LibraryMissingError, load_library

from dspark_ray.core.config import AppConfig, parse_app_config
from dspark_ray.core.errors import ConfigError
from dspark_ray.engine import build
from dspark_ray.engine.attention_choice import OWN, ChosenAttention, Trial, choose_attention, trials_of
from dspark_ray.engine.graphs import GraphedTarget
from dspark_ray.models.kv import FLOAT8, KVStorage
from dspark_ray.models.targets.decoder import Decoder
from tests.attention_fakes import fake_flash_attn, fake_flash_attn_3, fake_flashinfer, installed
from tests.contract.test_graphs import RerunCapturer
from tests.tiny import tiny_model_dir
from tests.tiny_engine import request, run, tiny_decoder, tiny_engine

HOPPER = (9, 0)


class Pretended:
    """A library that gives the own kernel's results, changed by `change`."""

    distribution = "pretended"

    def __init__(self, name: str, capturable: bool, change: Callable, refusal: str | None = None) -> None:
        self.name, self.capturable, self._change, self._refusal = name, capturable, change, refusal
        self.calls = 0

    def refusal(self, shape: AttentionShape) -> str | None:
        return self._refusal

    def __call__(self, q, k_cache, v_cache, batch, scale, window=None, soft_cap=None):
        self.calls += 1
        self.on_host = batch.on_host is not None
        self.most_keys = batch.max_kv
        assert batch.block_tables.shape[1] * batch.block_size >= batch.max_kv >= int(batch.kv_len.max())
        assert self.capturable or self.on_host, "its plan needs lengths on the host"
        return self._change(paged_attention(q, k_cache, v_cache, batch, scale, window, soft_cap))


def same(out):
    return out


def config(attention: str = "auto", **sections: dict) -> AppConfig:
    engine = {"attention": attention, "kv_num_blocks": 32, "max_running": 8, "max_step_rows": 64}
    plain = {"engine": engine, "model": {"max_model_len": 256}, "speculation": {"mode": "off"}}
    return parse_app_config(plain | sections)


def choose(
    libraries: dict[str, Pretended | Exception],
    times: dict[str, tuple[float, float]],
    *,
    captures: bool = True,
    attention: str = "auto",
    kv: KVStorage | None = None,
) -> ChosenAttention | Callable:
    """`times`: ms by kernel, of a decoding batch and of a prompt, for each layer."""
    target = tiny_decoder(29)
    kv = kv or target.new_kv(32 * 16)

    def load(name: str) -> Pretended:
        found = libraries.get(name, LibraryMissingError(f"{name} is not installed"))
        if isinstance(found, Exception):
            raise found
        return found

    def time_ms(call: Callable[[], torch.Tensor]) -> float:
        before = {name: one.calls for name, one in libraries.items() if isinstance(one, Pretended)}
        is_prompt = len(call()) == 64
        who = [name for name, calls in before.items() if libraries[name].calls > calls]
        return times[who[0] if who else OWN][is_prompt]

    return choose_attention(
        config(attention), target, kv, captures=captures, time_ms=time_ms, load=load, capability=HOPPER
    )


def names(chosen: ChosenAttention | Callable) -> tuple[str, str]:
    """In captured passes and in the others."""
    if chosen is paged_attention:
        return OWN, OWN
    assert isinstance(chosen, ChosenAttention)
    found = chosen.captured_name, chosen.eager_name
    for name, attend in zip(found, (chosen.captured, chosen.eager), strict=True):
        assert (name == OWN) == (attend is paged_attention)
        assert name == OWN or attend.name == name
    return found


FLASH = Pretended("flash_attn", True, same)
THIRD = Pretended("flash_attn_3", True, same)
INFER = Pretended("flashinfer", False, same)
EVERY = {one.name: one for one in (FLASH, THIRD, INFER)}


@pytest.mark.parametrize(
    ("captures", "times", "expected"),
    [
        (True, {OWN: (1, 1), "flash_attn": (2, 2), "flash_attn_3": (2, 2), "flashinfer": (2, 2)}, (OWN, OWN)),
        (
            True,
            {OWN: (1, 1), "flash_attn": (0.8, 2), "flash_attn_3": (0.7, 2), "flashinfer": (0.5, 0.5)},
            ("flash_attn_3", "flashinfer"),  # which cannot be captured
        ),
        (
            False,
            {OWN: (1, 1), "flash_attn": (0.8, 0.8), "flash_attn_3": (0.7, 2), "flashinfer": (0.5, 0.9)},
            (OWN, "flashinfer"),  # nothing is captured: decoding counts three times, a prompt once
        ),
        (
            True,  # 2% are no gain
            {OWN: (1, 1), "flash_attn": (0.98, 0.98), "flash_attn_3": (1, 0.96), "flashinfer": (1, 0.98)},
            (OWN, "flash_attn_3"),
        ),
    ],
)
def test_the_faster_one_is_chosen(captures, times, expected, caplog):
    caplog.set_level(logging.INFO)
    assert names(choose(EVERY, times, captures=captures)) == expected
    captured, eager = expected
    last = caplog.messages[-1]
    assert last == f"attention: {captured} in captured passes, {eager}" if captures else f"attention: {eager}"
    timed = [message for message in caplog.messages if "keys: own" in message]
    assert len(timed) == 4
    assert all(name in message for message in timed for name in EVERY)
    assert sum("flashinfer not captured" in message for message in timed) == (3 if captures else 0)


def test_captured_passes_are_those_whose_lengths_the_device_has():
    times = {OWN: (1, 1), "flash_attn": (0.5, 2), "flashinfer": (2, 0.5)}
    chosen = choose({"flash_attn": FLASH, "flashinfer": INFER}, times)
    assert names(chosen) == ("flash_attn", "flashinfer")
    ints = (torch.tensor(values, dtype=torch.int32) for values in ([0, 2], [5], [[0]]))
    host = PagedBatch(*ints, 16, 2, 5)
    placed = host.to(torch.device("cpu"))
    assert placed.on_host is host
    q, cache = torch.randn(2, 2, 16), torch.randn(2, 16, 1, 16)
    for batch, one, other in ((host, FLASH, INFER), (placed, INFER, FLASH)):
        before = one.calls, other.calls
        found = chosen(q, *cache, batch, 0.25, 3, 2.0)
        assert (one.calls, other.calls) == (before[0] + 1, before[1])
        assert torch.equal(found, paged_attention(q, *cache, batch, 0.25, 3, 2.0))


def test_decoding_is_tried_as_it_is_captured():
    one = Pretended("flash_attn", True, same)
    seen = []
    one._change = lambda out: seen.append((len(out) == 64, one.on_host)) or out
    for captures in (True, False):
        choose({"flash_attn": one}, {OWN: (1, 1), "flash_attn": (0.5, 2)}, captures=captures)
        assert set(seen) == {(False, not captures), (True, True)}
        seen.clear()


def test_nothing_installed_is_nothing_tried():
    assert choose({}, {}) is paged_attention


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (LibraryError("import flash_attn: OSError: undefined symbol"), "undefined symbol"),
        (Pretended("flash_attn", True, same, "its pages are larger"), "its pages are larger"),
        (Pretended("flash_attn", True, lambda out: 1 / 0), "ZeroDivisionError"),
        (Pretended("flash_attn", True, lambda out: out * 1.1), "it differs by"),
        (Pretended("flash_attn", True, lambda out: out * float("nan")), "it differs by"),
        (Pretended("flash_attn", True, lambda out: out[:, :1]), "its output is"),
    ],
)
def test_a_library_that_fails_is_left_out_and_the_log_says_why(broken, reason, caplog):
    libraries = {"flash_attn": broken, "flash_attn_3": THIRD}
    times = {OWN: (1.0, 1.0), "flash_attn": (0.1, 0.1), "flash_attn_3": (0.5, 0.5)}
    assert names(choose(libraries, times)) == ("flash_attn_3", "flash_attn_3")
    (message,) = [one for one in caplog.messages if "is left out" in one]
    assert message.startswith("attention: flash_attn is left out: ")
    assert reason in message
    with pytest.raises(ConfigError, match=r"engine\.attention is flash_attn.*set it to auto") as error:
        choose(libraries, times, attention="flash_attn")
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("name", "captures", "expected"),
    [
        ("flash_attn", True, ("flash_attn", "flash_attn")),
        ("flashinfer", True, (OWN, "flashinfer")),
        ("flashinfer", False, (OWN, "flashinfer")),
        ("own", True, (OWN, OWN)),
    ],
)
def test_one_that_is_named_is_used_where_it_can_be_however_slow(name, captures, expected):
    times = {OWN: (1.0, 1.0), "flash_attn": (9.0, 9.0), "flashinfer": (9.0, 9.0)}
    assert names(choose(EVERY, times, captures=captures, attention=name)) == expected


def test_one_that_is_named_and_not_installed():
    with pytest.raises(ConfigError, match="flashinfer is not installed; install it or set auto"):
        choose({}, {}, attention="flashinfer")


def test_an_engine_is_built_with_it(tmp_path, monkeypatch):
    model_dir = tiny_model_dir(tmp_path, "llama")
    given = []

    def pretend(config, target, kv, *, captures):
        given.append((target, kv, captures))
        return FLASH

    sections = {"model": {"max_model_len": 64, "dtype": "float32"}, "speculation": {"mode": "off"}}
    monkeypatch.setattr(build, "choose_attention", pretend)
    engine = build.build_engine(parse_app_config(sections), model_dir=model_dir)
    assert given == [(engine.target, engine.kv, False)]
    assert engine.target.attention is FLASH


def test_a_library_wants_a_gpu_and_one_rank():
    target = tiny_decoder(29)
    kv = target.new_kv(64)
    assert choose_attention(config(), target, kv, captures=False) is paged_attention
    with pytest.raises(ConfigError, match="needs a GPU"):
        choose_attention(config("flashinfer"), target, kv, captures=False)
    with pytest.raises(ConfigError, match=r"engine\.attention: several ranks"):
        parse_app_config({"engine": {"attention": "flashinfer", "tensor_parallel_size": 2}})
    with pytest.raises(ConfigError, match=r"engine\.attention is the native engine's"):
        parse_app_config({"engine": {"attention": "flashinfer", "kind": "vllm"}})


@pytest.mark.parametrize("dtype", [torch.float32, FLOAT8])
def test_the_cache_is_empty_again(dtype):
    kv = KVStorage(3, 32 * 16, 1, 16, dtype)
    choose({"flash_attn": FLASH}, {OWN: (1.0, 1.0), "flash_attn": (0.5, 0.5)}, kv=kv)
    assert not kv.k.float().any()
    assert not kv.v.float().any()


def test_every_trial_fits_the_engine():
    sizes = ((4, 32), (4, 64), (2048, 32), (2048, 4096))
    for running, (blocks, longest), gamma in itertools.product((1, 64), sizes, (1, 15)):
        engine = {"max_running": running, "max_step_rows": 64, "kv_num_blocks": blocks}
        sections = {
            "engine": engine,
            "model": {"max_model_len": longest},
            "speculation": {"drafter": {"kind": "ngram"}, "num_draft_tokens": gamma},
        }
        trials = trials_of(parse_app_config(sections), captures=True)
        assert any(trial.captured for trial in trials)
        assert any(not trial.captured for trial in trials)
        for one in trials:
            assert one.requests <= running
            assert 1 <= one.rows <= one.keys <= longest
            assert one.requests * one.rows <= 64
            assert one.requests * one.keys <= blocks * 16
            assert one.most_keys == (longest if one.captured else one.keys)
    assert str(Trial(2, 8, 100, True, 256)) == "2×8 rows over 100 keys"


# --- a whole engine


def bf16_decoder() -> Decoder:
    target = tiny_decoder(29, sharpness=8.0, dtype=torch.bfloat16)
    target._stack = None  # layers one by one, as on a GPU
    return target


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_3", "flashinfer"])
@pytest.mark.parametrize("mode", ["off", "fixed"])
def test_texts_are_those_of_the_own_kernel(name, mode):
    fakes = {
        "flash_attn": fake_flash_attn(),
        "flash_attn_interface": fake_flash_attn_3(),
        "flashinfer": fake_flashinfer(),
    }
    block_size = 256 if name == "flash_attn" else 16
    requests = [request(f"r{i}", range(1, 4 + 7 * i), max_tokens=12, temperature=0.0) for i in range(3)]
    texts, used, capturer = [], [], RerunCapturer()
    with installed(**fakes):
        for attention in (paged_attention, load_library(name)):
            target = bf16_decoder()
            target.attention = lambda *args, attend=attention: used.append(attend) or attend(*args)
            engine = tiny_engine(
                None,
                vocab_size=29,
                target=target,
                speculation={"mode": mode},
                engine={"max_running": 4, "kv_block_size": block_size, "kv_num_blocks": 16},
            )
            if name != "flashinfer":  # and captured passes, with pad rows
                engine.graphs = GraphedTarget(engine.config, target, engine.kv, capturer)
            texts.append(run(engine, requests))
    assert texts[0] == texts[1]
    assert used.count(attention) > 12  # layers of steps
    assert (capturer.replays > 0) == (name != "flashinfer")
    assert all(len(text) == 12 for text in texts[0].values())
