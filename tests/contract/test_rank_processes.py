"""A rank in a process of its own: the same texts, nothing shared but a ring and sockets, and its death."""

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from dspark_ray.core.errors import RankError
from dspark_ray.models.parallel.ring import Ring
from dspark_ray.models.targets.decoder import load_target
from dspark_ray.runtime.ranks import FollowerEnd, LeaderEnd, TargetSpec
from tests.tiny import tiny_model_dir
from tests.tiny_engine import request, run, tiny_engine
from tests.tiny_ranks import HOST


def follow(parent: Connection, spec: TargetSpec) -> None:
    """The other process."""
    torch.set_num_threads(1)
    end = FollowerEnd(1, HOST, "a")
    parent.send(end.place)
    end.join(parent.recv())
    parent.recv()  # only now: the ring has lost its name before anything was loaded
    end.load(spec).run()


def test_a_rank_in_another_process_follows_and_its_death_is_named(tmp_path: Path) -> None:
    spec = TargetSpec(tiny_model_dir(tmp_path, vocab_size=61), torch.float32, 128)
    requests = [request(f"r{i}", [3 + i, 5, 8, 3 + i, 5], temperature=0.0, max_tokens=12) for i in range(4)]
    expected = run(tiny_engine(None, target=load_target(spec.model_dir, spec.dtype, 128)), requests)
    spawn = multiprocessing.get_context("spawn")
    pipe, other = spawn.Pipe()
    process = spawn.Process(target=follow, args=(other, spec), daemon=True)
    process.start()
    leader = LeaderEnd.open(HOST, "a", [pipe.recv()], 1 << 18, step_timeout_s=60.0)
    pipe.send(leader.link)
    leader.join()
    assert leader.link.ring_name is not None
    with pytest.raises(RankError, match="cannot be opened"):  # it leaves nothing, however they end
        Ring.attach(leader.link.ring_name)
    pipe.send("go on")
    engine = tiny_engine(None, target=leader.load(spec))
    assert run(engine, requests) == expected
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with pytest.raises(RankError, match=r"rank 1 has ended in message \d+"):
        run(engine, requests)
    leader.close()
