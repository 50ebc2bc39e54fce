"""Ranks on devices: the way that NCCL takes, over a backend that stands for it and a device that is none.

NCCL itself has not run these tests: torch's CPU build has none.
"""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from dspark_ray.core.errors import ConfigError, RankError
from dspark_ray.engine.device import choose_device
from dspark_ray.models.collective import join_group
from dspark_ray.models.parallel import leader as leader_module
from dspark_ray.models.targets.decoder import load_target
from dspark_ray.runtime.ranks import FollowerEnd, LeaderEnd, TargetSpec
from tests.far_device import FAR, FarTensor, far_device
from tests.tiny import tiny_model_dir
from tests.tiny_engine import request, run, tiny_engine
from tests.tiny_lora import MODULES, adapter_tensors, write_adapter
from tests.tiny_ranks import HOST, join_and_load

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 61,
}


class StandIn:
    """NCCL's interface over gloo: it takes tensors of the device and no others, and gives nothing to wait
    for."""

    made: ClassVar[list["StandIn"]] = []

    class Options:
        _timeout: timedelta

    def __init__(self, store: dist.Store, rank: int, count: int, options: "StandIn.Options") -> None:
        gloo: Any = dist.ProcessGroupGloo
        own = gloo._Options()
        own._devices = [gloo.create_device(hostname=HOST)]
        own._timeout = options._timeout
        self._gloo = gloo(store, rank, count, own)
        self.timeouts: list[timedelta] = []
        self.made.append(self)

    def rank(self) -> int:
        return int(self._gloo.rank())

    def size(self) -> int:
        return int(self._gloo.size())

    def abort(self) -> None:
        self._gloo.abort()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        self._note(options)
        self._gloo.allreduce(_held(tensors), options).wait()

    def gather(self, out: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any) -> None:
        self._note(options)
        self._gloo.gather([_held(part) for part in out], _held(tensors), options).wait()

    def _note(self, options: Any) -> None:
        assert not options.asyncOp, "it belongs into the stream that computes"
        self.timeouts.append(options.timeout)


def _held(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    assert all(isinstance(tensor, FarTensor) for tensor in tensors), "a tensor that is not on the device"
    return [tensor.held for tensor in tensors if isinstance(tensor, FarTensor)]


class Event:
    def query(self) -> bool:
        return True


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", StandIn, raising=False)
    monkeypatch.setattr(leader_module, "_event", lambda device: Event())
    monkeypatch.setattr(StandIn, "made", [])
    return StandIn


def _follow(end: FollowerEnd, link: Any, spec: TargetSpec) -> None:
    with far_device():
        join_and_load(end, link, spec).run()


@contextlib.contextmanager
def far_ranks(spec: TargetSpec) -> Iterator[Any]:
    """Two ranks on devices, the second in a thread."""
    with far_device() as device, ThreadPoolExecutor(1) as pool:
        end = FollowerEnd(1, HOST, "a", device)
        leader = LeaderEnd.open(HOST, "a", [end.place], 1 << 18, step_timeout_s=30.0, device=device)
        following = pool.submit(_follow, end, leader.link, spec)
        try:
            yield leader.load(spec)
        finally:
            leader.close()
            following.result(30.0)
            end.close()


def test_texts_on_devices_are_those_of_one_rank_on_the_cpu(tmp_path: Path, nccl: type[StandIn]) -> None:
    spec = TargetSpec(tiny_model_dir(tmp_path, **SHAPE), torch.float32, 128)
    kv_heads = {"self_attn.k_proj": (32, 32), "self_attn.v_proj": (32, 32)}
    adapter = write_adapter(tmp_path / "all", "all", adapter_tensors("all", MODULES | kv_heads))
    items = [
        request("greedy", [3, 5, 8], temperature=0.0, max_tokens=12),
        request("adapted", [3, 5, 8], temperature=0.0, max_tokens=12, adapter=adapter),
        request("seeded", [5, 8, 3, 5], temperature=0.8, seed=3, max_tokens=12),
        request("its prompt's", [9, 1, 4], temperature=0.0, prompt_logprobs=2, max_tokens=4),
    ]
    whole = load_target(spec.model_dir, spec.dtype, spec.max_positions)
    expected = run(tiny_engine(None, target=whole), items)
    assert expected["greedy"] != expected["adapted"]
    with far_ranks(spec) as target:
        assert target.device == FAR
        engine = tiny_engine(None, target=target, speculation={"mode": "fixed"})
        assert engine.kv.k.device == FAR
        assert run(engine, items) == expected
        assert not target.can_be_captured
    first, second = nccl.made
    assert len(first.timeouts) == len(second.timeouts) > 50
    # The device's own end of a wait comes after the one that names the culprit.
    assert first.timeouts[-1] == timedelta(seconds=60)


def test_without_nccl_ranks_on_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, "ProcessGroupNCCL", raising=False)
    with pytest.raises(ConfigError, match=r"set model\.device: cpu"):
        join_group(dist.HashStore(), rank=0, count=2, host=HOST, timeout_s=1.0, device=torch.device("cuda"))


def test_ranks_on_different_kinds_of_device_are_refused() -> None:
    end = FollowerEnd(1, HOST, "a")
    with pytest.raises(ConfigError, match=r"rank 0 computes on meta and rank 1, on 127.0.0.1, on cpu"):
        LeaderEnd.open(HOST, "a", [end.place], 1 << 12, device=FAR)
    end.close()


def test_ranks_of_one_machine_take_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert [choose_device("cuda", rank, 2).index for rank in range(2)] == [0, 1]
    assert current == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert choose_device("cuda", 3, 1).index == 0  # of a Ray actor, which sees its own alone
    assert choose_device("auto", 1, 3) == torch.device("cpu")
    with pytest.raises(ConfigError, match="3 ranks need a GPU each, and this machine shows 2"):
        choose_device("cuda", 1, 3)


def test_a_loss_is_an_error_on_the_way_to_nccl_too(nccl: type[StandIn]) -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    with pytest.raises(RankError, match="rank 0 of 2 cannot join"):
        join_group(store, rank=0, count=2, host=HOST, timeout_s=1.0, device=FAR)
