"""LoRA adapters over several ranks: what each writes is what a whole model with it merged in writes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dspark_ray.core.errors import RequestError
from dspark_ray.core.types import AdapterRef, Request
from dspark_ray.models.targets.decoder import load_target
from dspark_ray.models.weights import StoredTensor
from dspark_ray.runtime.ranks import TargetSpec
from tests import tiny_lora
from tests.contract.test_targets import edit_weights
from tests.tiny import tiny_model_dir
from tests.tiny_engine import STEEP_TABLE, request, run, tiny_drafter_dir, tiny_engine
from tests.tiny_lora import ADAPTERS, merged_deltas, write_adapter
from tests.tiny_ranks import led, on_every_rank, ranks

# Two ranks with a KV head each; three with heads that are odd; four that share KV heads.
SHAPES: dict[int, dict[str, Any]] = {
    2: {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    3: {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 4},
    4: {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
}
INNER, VOCAB = 48, 61


class Setting:
    """A target, adapters that fit it, and the text that each of them should write."""

    def __init__(self, folder: Path, count: int) -> None:
        shape = {"intermediate_size": INNER, "vocab_size": VOCAB, **SHAPES[count]}
        self.spec = TargetSpec(tiny_model_dir(folder, **shape), torch.float32, 128)
        modules = _modules(shape)
        self.adapters: dict[str, AdapterRef] = {}
        self.expected: dict[str, list[int]] = {}
        for name in (None, *ADAPTERS):
            model_dir = self.spec.model_dir
            if name is not None:
                tensors = tiny_lora.adapter_tensors(name, modules)
                self.adapters[name] = write_adapter(folder / name.replace(" ", "-"), name, tensors)
                model_dir = Path(shutil.copytree(model_dir, folder / f"merged {name}"))
                stored = load_file(model_dir / "model.safetensors")
                deltas = merged_deltas(name, tensors)
                edit_weights(model_dir, **{key: stored[key] + delta for key, delta in deltas.items()})
            target = load_target(model_dir, torch.float32, 128)
            plain = tiny_engine(None, target=target, speculation={"mode": "off"})
            self.expected |= run(plain, self.requests([name], with_adapters=False))

    def requests(self, names: list[str | None], *, with_adapters: bool = True) -> list[Request]:
        return [
            request(
                f"{name} {i}",
                [3 + i, 5, 8, 3 + i, 5, 8, 13],
                max_tokens=16,
                adapter=self.adapters[name] if name is not None and with_adapters else None,
                **kind,
            )
            for i, kind in enumerate([{"temperature": 0.0}, {"temperature": 0.8, "seed": 7}])
            for name in names
        ]


def _modules(shape: dict[str, Any]) -> dict[str, tuple[int, int]]:
    hidden, heads, kv_heads = shape["hidden_size"], shape["num_attention_heads"], shape["num_key_value_heads"]
    size = shape["head_dim"]
    return {
        "self_attn.q_proj": (heads * size, hidden),
        "self_attn.k_proj": (kv_heads * size, hidden),
        "self_attn.v_proj": (kv_heads * size, hidden),
        "self_attn.o_proj": (hidden, heads * size),
        "mlp.gate_proj": (INNER, hidden),
        "mlp.up_proj": (INNER, hidden),
        "mlp.down_proj": (hidden, INNER),
    }


@pytest.mark.parametrize("count", SHAPES)
def test_texts_are_those_of_merged_models(tmp_path: Path, count: int) -> None:
    setting = Setting(tmp_path, count)
    every: list[str | None] = [None, *ADAPTERS]
    assert len({tuple(text) for text in setting.expected.values()}) == len(setting.expected)
    with led(setting.spec, ["a", "b", "a", "b"][:count]) as led_ranks:
        engine = tiny_engine(None, target=led_ranks.target, table=STEEP_TABLE, speculation={"mode": "fixed"})
        assert run(engine, setting.requests(every)) == setting.expected
        first, *others = led_ranks.journals()
        assert all(other == first for other in others)


def test_a_drafter_on_rank_0_and_adapters_that_come_and_go(tmp_path: Path) -> None:
    setting = Setting(tmp_path, 2)
    checkpoint = tiny_drafter_dir(tmp_path / "drafter", VOCAB, draft_vocab=None)
    with led(setting.spec, ["a", "a"]) as led_ranks:
        engine = tiny_engine(
            checkpoint,
            target=led_ranks.target,
            table=STEEP_TABLE,
            speculation={"mode": "adaptive"},
            lora={"max_loaded": 2},
        )
        for name in ("all", "attention", "rslora", "all"):
            items = setting.requests([name, None])
            assert run(engine, items) == {
                item.request_id: setting.expected[item.request_id] for item in items
            }
        assert engine.counters.drafted_tokens > 0
        held = led_ranks.followers[0]._adapters
        assert set(held) == {setting.adapters[name].digest for name in ("rslora", "all")}


def test_a_rank_reads_its_own_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(tmp_path, 2)
    read = StoredTensor.read
    seen: list[tuple[str, int]] = []

    def noted(self: StoredTensor, part: Any = None) -> torch.Tensor:
        tensor = read(self, part)
        seen.append((self._name, tensor.numel()))
        return tensor

    with ranks(2) as groups:
        targets = on_every_rank(
            groups, lambda g: load_target(setting.spec.model_dir, torch.float32, 128, "none", g)
        )
        monkeypatch.setattr(StoredTensor, "read", noted)
        targets[1].load_adapter(setting.adapters["all"], 64)
    tensors = load_file(Path(setting.adapters["all"].path) / "adapter_model.safetensors")
    assert {name for name, _ in seen} == tensors.keys()
    for name, count in seen:
        divided = ("lora_A" in name) == ("o_proj" in name or "down_proj" in name)
        assert count * (2 if divided else 1) == tensors[name].numel(), name


def test_an_adapter_that_one_rank_cannot_read_is_the_requests_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting(tmp_path, 2)
    with led(setting.spec, ["a", "b"]) as led_ranks:
        engine = tiny_engine(None, target=led_ranks.target, speculation={"mode": "off"})
        elsewhere = tmp_path / "elsewhere"  # as if rank 1's node had no such folder
        decoder = led_ranks.followers[0]._decoder
        load = decoder.load_adapter
        lost = AdapterRef("all", str(elsewhere), setting.adapters["all"].digest)
        monkeypatch.setattr(decoder, "load_adapter", lambda ref, max_rank: load(lost, max_rank))
        with pytest.raises(RequestError, match="rank 1 cannot load this adapter"):
            engine.add_request(setting.requests(["all"])[0])
        assert not engine.has_work()
        monkeypatch.undo()
        items = setting.requests(["all", None])  # once it lies there, it is served
        assert run(engine, items) == {item.request_id: setting.expected[item.request_id] for item in items}
