"""Ranks of an engine without a server: the others are processes of this machine, for commands that end.

ranks = LocalRanks(config, model_dir)
engine = build_engine(config, model_dir=model_dir, load=ranks.load)
ranks.close()

A served replica's ranks are Ray actors instead (engine_client.py), which Ray places, shows and ends. These
end with the process that started them, however it ends.
"""

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from dspark_ray.core.config import AppConfig
from dspark_ray.core.errors import DsparkError, RankError
from dspark_ray.engine.device import choose_device
from dspark_ray.models.parallel.leader import LeadingDecoder
from dspark_ray.models.targets.config import read_decoder_config
from dspark_ray.models.targets.shard import check_ranks
from dspark_ray.runtime.logs import configure_logging
from dspark_ray.runtime.rank_link import RankPlace
from dspark_ray.runtime.ranks import FollowerEnd, LeaderEnd, ring_bytes

HOST, NODE = "127.0.0.1", "this machine"
START_TIMEOUT_S = 120.0  # for a process to start, and to import torch
REASON_TIMEOUT_S = 5.0  # for a process that failed to say why


class LocalRanks:
    """The processes of ranks 1 and up, each with as many threads as this one. `close()` ends them; so does
    the end of this process."""

    def __init__(self, config: AppConfig, model_dir: Path) -> None:
        self._config, self._model_dir = config, model_dir
        self._others: list[_Other] = []
        self._leader: LeaderEnd | None = None

    def load(self) -> LeadingDecoder:
        """Starts them; all load at the same time. Raises what loading raises on any rank."""
        count = self._config.engine.tensor_parallel_size
        check_ranks(count, read_decoder_config(self._model_dir))  # before anything is started
        device = choose_device(self._config.model.device, 0, count)
        self._others = [_Other(self._config, self._model_dir, rank) for rank in range(1, count)]
        try:
            places = [other.place() for other in self._others]
            self._leader = LeaderEnd.open(HOST, NODE, places, ring_bytes(self._config), device=device)
            for other in self._others:
                other.pipe.send(self._leader.link)
            return self._leader.load_for(self._config, self._model_dir)
        except BaseException as error:
            reason = first_reason(self._others) if isinstance(error, RankError) else None
            self.close()
            if reason is not None:
                raise reason from error
            raise

    def close(self) -> None:
        """Idempotent."""
        if self._leader is not None:
            self._leader.close()
        for other in self._others:
            other.close()
        self._others, self._leader = [], None


class _Other:
    """One of the processes, from the side of the one that starts it."""

    def __init__(self, config: AppConfig, model_dir: Path, rank: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.rank = rank
        self.pipe, theirs = spawn.Pipe()
        arguments = (theirs, config, model_dir, rank, torch.get_num_threads())
        self.process: BaseProcess = spawn.Process(
            target=_follow, args=arguments, name=f"dspark-rank{rank}", daemon=True
        )
        self.process.start()
        theirs.close()  # so that its end shows here

    def place(self) -> RankPlace:
        """Where it listens, once it does."""
        try:
            if self.pipe.poll(START_TIMEOUT_S):
                found = self.pipe.recv()
                assert isinstance(found, RankPlace)
                return found
        except EOFError:
            self.process.join(REASON_TIMEOUT_S)
            raise RankError(
                f"rank {self.rank} ended with code {self.process.exitcode} as it started"
            ) from None
        raise RankError(f"rank {self.rank} has not started within {START_TIMEOUT_S:g} s")

    def reason(self) -> DsparkError | None:
        """Why it failed, if it did and said so."""
        try:
            if self.pipe.poll(REASON_TIMEOUT_S):
                found = self.pipe.recv()
                return found if isinstance(found, DsparkError) else None
        except EOFError:
            pass
        return None

    def close(self) -> None:
        self.pipe.close()  # which it notices, whatever it does
        self.process.join(REASON_TIMEOUT_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def first_reason(others: Sequence[_Other]) -> DsparkError | None:
    """What another rank said of itself; one that only lost the others comes last."""
    reasons = [reason for other in others if (reason := other.reason()) is not None]
    return min(reasons, key=lambda reason: isinstance(reason, RankError), default=None)


def _follow(parent: Connection, config: AppConfig, model_dir: Path, rank: int, num_threads: int) -> None:
    """The other process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, and its end is this one's
    configure_logging(logging.WARNING)
    torch.set_num_threads(num_threads)
    device = choose_device(config.model.device, rank, config.engine.tensor_parallel_size)
    end = FollowerEnd(rank, HOST, NODE, device)
    parent.send(end.place)
    link = parent.recv()
    threading.Thread(target=_end_with, args=(parent,), name="dspark-parent", daemon=True).start()
    try:
        end.join(link)
        end.load_for(config, model_dir).run()
    except DsparkError as error:
        parent.send(error)
    finally:
        end.close()


def _end_with(parent: Connection) -> None:
    """This process waits for messages without end: the other end of the pipe says that there will be none."""
    try:
        parent.recv()
    except (EOFError, OSError):
        os._exit(1)
