"""LoRA adapters: what one writes is what a model with the adapter merged into its weights writes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark_ray.core.errors import QueueFullError, RequestError
from dspark_ray.core.types import AdapterRef, Request
from dspark_ray.engine.engine import Engine
from tests import tiny_engine as tiny
from tests import tiny_lora
from tests.tiny_engine import collect, run, tiny_decoder, tiny_drafter_dir, tiny_engine
from tests.tiny_lora import ADAPTERS, MODULES, adapter_tensors, merged_deltas, write_adapter

VOCAB = 24


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, AdapterRef]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name.replace(" ", "-"), name) for name in ADAPTERS}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drafter_dir(tmp_path_factory.mktemp("drafter"), VOCAB, draft_vocab=None)


def requests(adapters: dict[str, AdapterRef], names: list[str | None] | None = None) -> list[Request]:
    """Three prompts of each adapter and of the model itself: only the adapter differs."""
    prompts = [tuple((5 * i + 3 * j) % VOCAB for j in range(11 + 9 * i)) for i in range(3)]
    sampling: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.0},
    ]
    return [
        tiny.request(
            f"{name} {i}", prompt, max_tokens=20, adapter=None if name is None else adapters[name], **kind
        )
        for i, (prompt, kind) in enumerate(zip(prompts, sampling, strict=True))
        for name in (names or [None, *adapters])
    ]


@pytest.fixture(scope="module")
def merged(adapters: dict[str, AdapterRef]) -> dict[str, list[int]]:
    """The texts of five models without adapters, one after the other, undrafted."""
    texts: dict[str, list[int]] = {}
    for name in (None, *adapters):
        target = tiny_decoder(VOCAB, added=None if name is None else merged_deltas(name))
        plain = tiny_engine(None, vocab_size=VOCAB, target=target, speculation={"mode": "off"})
        items = [replace(item, adapter=None) for item in requests(adapters, [name])]
        texts |= run(plain, items)
    return texts


def lora_engine(checkpoint: Path | None, mode: str, **sections: Any) -> Engine:
    return tiny_engine(checkpoint, vocab_size=VOCAB, speculation={"mode": mode}, **sections)


@pytest.mark.parametrize("mode", ["off", "fixed", "adaptive"])
@pytest.mark.parametrize(
    "memory",
    [
        {"max_running": 16},
        {"max_running": 16, "max_step_rows": 16},  # prompts in chunks
        {"max_running": 16, "kv_num_blocks": 48},  # preemption
        {"max_running": 16, "prefix_cache": False},
    ],
    ids=["together", "chunked", "preempted", "uncached"],
)
def test_texts_are_those_of_merged_models(
    adapters: dict[str, AdapterRef],
    merged: dict[str, list[int]],
    checkpoint: Path,
    mode: str,
    memory: dict[str, Any],
) -> None:
    engine = lora_engine(checkpoint, mode, engine=memory)
    assert run(engine, requests(adapters)) == merged
    assert len({tuple(text) for text in merged.values()}) == len(merged)  # every adapter matters
    if mode != "off":
        assert engine.counters.accepted_tokens > 0
    if "kv_num_blocks" in memory:
        assert engine.stats().num_preemptions > 0
    assert engine.pool.num_used == 0


def test_a_cached_prefix_belongs_to_its_adapter(
    adapters: dict[str, AdapterRef], merged: dict[str, list[int]], checkpoint: Path
) -> None:
    engine = lora_engine(checkpoint, "fixed")
    seen: set[str | None] = set()
    for name in (None, "all", "attention", "all", None):  # the same prompts, one adapter after the other
        before = engine.stats().prefix_hit_tokens
        items = requests(adapters, [name])
        assert run(engine, items) == {item.request_id: merged[item.request_id] for item in items}
        assert (engine.stats().prefix_hit_tokens > before) == (name in seen)
        seen.add(name)


def test_adapters_come_and_go(
    adapters: dict[str, AdapterRef], merged: dict[str, list[int]], checkpoint: Path
) -> None:
    engine = lora_engine(checkpoint, "adaptive", lora={"max_loaded": 2})
    for name in ("all", "attention", "rslora", "all"):
        items = requests(adapters, [name, None])
        assert run(engine, items) == {item.request_id: merged[item.request_id] for item in items}
    assert engine.adapters.held() == ["rslora", "all"]
    engine.adapters.forget(adapters["all"].digest)
    assert engine.adapters.held() == ["rslora"]


def test_too_many_at_once_are_told_to_come_again(adapters: dict[str, AdapterRef], checkpoint: Path) -> None:
    engine = lora_engine(checkpoint, "fixed", lora={"max_loaded": 2})
    for name in ("all", "attention"):
        engine.add_request(requests(adapters, [name])[0])
    refused = requests(adapters, ["rslora"])[0]
    with pytest.raises(QueueFullError, match="all 2 adapters that may be loaded are in use"):
        engine.add_request(refused)
    assert engine.abort("all 0")
    engine.add_request(refused)
    texts: dict[str, list[int]] = {"attention 0": [], "rslora 0": []}
    while engine.has_work():
        collect(engine.step(), texts)
    assert all(len(text) == 20 for text in texts.values())


def test_a_batch_without_adapters_pays_nothing(adapters: dict[str, AdapterRef], checkpoint: Path) -> None:
    engine = lora_engine(checkpoint, "fixed")
    engine.adapters.load(adapters["all"])
    engine.add_request(requests(adapters, [None])[0])
    assert engine.adapters.rows(engine._plan()) is None


def test_an_adapter_of_a_refused_request_can_leave(adapters: dict[str, AdapterRef]) -> None:
    engine = lora_engine(None, "off", lora={"max_loaded": 1})
    too_long = tiny.request("long", range(VOCAB), max_tokens=10_000, adapter=adapters["all"])
    with pytest.raises(RequestError, match="exceed"):
        engine.add_request(too_long)
    engine.adapters.load(adapters["attention"])
    assert engine.adapters.held() == ["attention"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "LOHA"}, "only LORA"),
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"bias": "all"}, "bias = all is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"a_later_invention": 3}, "a_later_invention = 3 is not supported"),
        ({"init_lora_weights": "pissa"}, "changes the model's own weights"),
        ({"r": 128}, "rank 128 exceeds lora.max_rank 64"),
        ({"r": "4"}, "not a rank"),
        ({"lora_alpha": None}, "not a number"),
        ({"r": 5}, r"lora_A.weight' has shape \[4, 32\], the config asks for \[5, 32\]"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    ref = write_adapter(tmp_path, "all", **config)
    engine = lora_engine(None, "off")
    with pytest.raises(RequestError, match=message):
        engine.add_request(tiny.request("r", [1, 2], adapter=ref))
    assert not engine.has_work()


def test_tensors_without_a_place_are_refused(tmp_path: Path) -> None:
    extra = {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, tiny.HIDDEN)}
    ref = write_adapter(tmp_path, "all", adapter_tensors("all") | extra)
    engine = lora_engine(None, "off")
    with pytest.raises(RequestError, match=r"no place in the model: base_model.model.lm_head.lora_A.weight"):
        engine.adapters.load(ref)


def test_half_a_product_is_refused(tmp_path: Path) -> None:
    tensors = adapter_tensors("all")
    del tensors["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"]
    with pytest.raises(RequestError, match=r"layers.1.mlp.up_proj.lora_B.weight' \[48, 4\] is missing"):
        lora_engine(None, "off").adapters.load(write_adapter(tmp_path, "all", tensors))


def test_files_that_changed_are_not_the_adapter(tmp_path: Path) -> None:
    ref = write_adapter(tmp_path, "all")
    write_adapter(tmp_path, "attention")
    with pytest.raises(RequestError, match="has changed since"):
        lora_engine(None, "off").adapters.load(ref)


def test_a_bf16_row_does_not_depend_on_the_adapters_beside_it(
    adapters: dict[str, AdapterRef], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny.skip_without_invariant_kernels()
    monkeypatch.setattr(tiny, "HEAD_DIM", 32)  # smaller heads go to torch's attention
    shapes = {
        **MODULES,
        "self_attn.q_proj": (64, 32),
        "self_attn.k_proj": (32, 32),
        "self_attn.v_proj": (32, 32),
    }
    monkeypatch.setattr(tiny_lora, "MODULES", {**shapes, "self_attn.o_proj": (32, 64)})
    wide = {name: write_adapter(tmp_path / name, name) for name in ("all", "attention", "rslora")}
    target = tiny_decoder(VOCAB, dtype=torch.bfloat16)
    checkpoint = tiny_drafter_dir(tmp_path / "drafter", VOCAB, draft_vocab=None)
    plain = {"mode": "off"}
    expected: dict[str, list[int]] = {}
    for item in requests(wide):
        alone = tiny_engine(None, vocab_size=VOCAB, target=target, speculation=plain)
        expected |= run(alone, [item])
    drafted = tiny_engine(checkpoint, vocab_size=VOCAB, target=target, speculation={"mode": "adaptive"})
    assert run(drafted, requests(wide)) == expected
    assert drafted.counters.accepted_tokens > 0
