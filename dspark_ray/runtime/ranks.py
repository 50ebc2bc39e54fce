"""How the ranks of one engine find each other and talk: a ring in shared memory to those on rank 0's node,
zmq to the others; gloo between all on CPUs, NCCL on GPUs.

end = FollowerEnd(rank=1, host="10.0.0.7", node="a")      # in the rank's process
leader = LeaderEnd.open(host, node, [end.place, ...], num_bytes)  # in rank 0's
leader.join(), end.join(leader.link)                      # at the same time
target, follower = leader.load(spec), end.load(spec)      # at the same time
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import zmq

from dspark_ray.core.config import AppConfig
from dspark_ray.core.errors import ConfigError
from dspark_ray.engine.build import DTYPES, KV_DTYPES, check_kv_dtype
from dspark_ray.engine.device_memory import check_fits, device_needs
from dspark_ray.models.collective import Group, join_group
from dspark_ray.models.parallel.channel import RankReceiver
from dspark_ray.models.parallel.follower import Follower
from dspark_ray.models.parallel.journal import JournalEntry
from dspark_ray.models.parallel.leader import HEAD_BYTES, LeadingDecoder
from dspark_ray.models.parallel.ring import Ring
from dspark_ray.models.quantized import open_weights
from dspark_ray.models.targets.config import read_decoder_config
from dspark_ray.models.targets.decoder import LINEARS, load_target
from dspark_ray.models.weights import CPU
from dspark_ray.runtime.rank_channel import WAITING_MESSAGES, RankBroadcast, WireReceiver
from dspark_ray.runtime.rank_link import RankLink, RankPlace
from dspark_ray.runtime.transport import bind_inbox, connect

LOAD_TIMEOUT_S = 1800.0  # a rank may have to fetch its model first
STEP_TIMEOUT_S = 60.0  # longest wait for another rank within a step


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """Which decoder is divided."""

    model_dir: Path
    dtype: torch.dtype
    max_positions: int
    quantization: str = "none"
    kv_dtype: torch.dtype | None = None  # None: `dtype`


def target_spec(config: AppConfig, model_dir: Path) -> TargetSpec:
    """The target of a configuration."""
    model = config.model
    kv_dtype = KV_DTYPES[config.engine.kv_dtype]
    return TargetSpec(model_dir, DTYPES[model.dtype], model.max_model_len, model.quantization, kv_dtype)


def ring_bytes(config: AppConfig) -> int:
    """Room for several of the longest messages that an engine of this configuration sends."""
    engine = config.engine
    tables = engine.max_running * (-(-config.model.max_model_len // engine.kv_block_size) + 2) * 4
    rows = engine.max_step_rows * 5 * 8  # a token, a position, a slot, a row of logits and an adapter each
    return 4 * (tables + rows + 2 * HEAD_BYTES)


class LeaderEnd:
    """Rank 0's side: rendezvous, ring and wires. `close()` ends what the others wait for."""

    def __init__(
        self,
        host: str,
        link: RankLink,
        store: dist.TCPStore,
        sender: RankBroadcast,
        device: torch.device = CPU,
    ) -> None:
        self.link = link
        self._host, self._store, self._sender, self._device = host, store, sender, device
        self._group: Group | None = None
        self._decoder: LeadingDecoder | None = None

    @classmethod
    def open(
        cls,
        host: str,
        node: str,
        places: Sequence[RankPlace],
        num_bytes: int,
        *,
        step_timeout_s: float = STEP_TIMEOUT_S,
        device: torch.device = CPU,
    ) -> "LeaderEnd":
        """Binds everything to free ports of `host`. `num_bytes`: of the ring. `device`: rank 0's; the others
        compute on the same kind, or `ConfigError`."""
        ranks = list(enumerate(places, start=1))
        for rank, place in ranks:
            if place.device != device.type:
                raise ConfigError(
                    f"rank 0 computes on {device.type} and rank {rank}, on {place.host}, on {place.device}: "
                    "set model.device to cpu or cuda, so that all have the same"
                )
        readers = {rank: index for index, rank in enumerate(r for r, p in ranks if p.node == node)}
        ring = Ring.create(len(readers), num_bytes) if readers else None
        context = zmq.Context()
        acks = bind_inbox(context, host)
        wires = {
            rank: connect(context, place.address, num_messages=WAITING_MESSAGES)
            for rank, place in ranks
            if rank not in readers
        }
        store = dist.TCPStore(
            host,
            0,
            len(places) + 1,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=LOAD_TIMEOUT_S),
        )
        link = RankLink(
            places=tuple(places),
            store=(host, store.port),
            ring_name=None if ring is None else ring.name,
            readers=readers,
            acks_address=acks.address,
            step_timeout_s=step_timeout_s,
        )
        return cls(host, link, store, RankBroadcast(ring, readers, wires, acks, step_timeout_s), device)

    def join(self) -> Group:
        """Meets the others, who have attached to the ring by then: its name goes, so that nothing is left of
        it whenever and however its processes end."""
        if self._group is None:
            self._group = _join(self._store, 0, self.link, self._host, self._device)
            self._sender.all_are_here()
        return self._group

    def load(self, spec: TargetSpec) -> LeadingDecoder:
        """Rank 0's shard, made while the others make theirs."""
        group = self.join()
        decoder = LeadingDecoder(
            self._sender,
            group,
            read_decoder_config(spec.model_dir),
            open_weights(spec.model_dir, device=self._device),
            spec.dtype,
            spec.max_positions,
            LINEARS[spec.quantization],
            spec.kv_dtype,
        )
        _meet(group, self.link)
        self._decoder = decoder
        return decoder

    def load_for(self, config: AppConfig, model_dir: Path) -> LeadingDecoder:
        """Rank 0's shard of a configuration's target. `ConfigError` where it does not fit into its GPU."""
        check_rank_fits(config, model_dir, 0, self._device)
        return self.load(target_spec(config, model_dir))

    def journal(self) -> tuple[JournalEntry, ...]:
        """What the others were told last, oldest first."""
        return () if self._decoder is None else self._decoder.journal.entries()

    def close(self) -> None:
        """The others end."""
        if self._decoder is not None:
            self._decoder.stop()
        self._sender.close()
        if self._group is not None:
            self._group.close()


class FollowerEnd:
    """Another rank's side."""

    def __init__(self, rank: int, host: str, node: str, device: torch.device = CPU) -> None:
        self._rank, self._host, self._context, self._device = rank, host, zmq.Context(), device
        self._inbox = bind_inbox(self._context, host, num_messages=WAITING_MESSAGES)
        self.place = RankPlace(node, host, self._inbox.address, device.type)
        self._group: Group | None = None
        self._receiver: RankReceiver | None = None
        self._link: RankLink | None = None

    def join(self, link: RankLink) -> None:
        """Attaches to what rank 0 has made, and meets the others."""
        self._receiver, self._link = self._listen(link), link
        store = dist.TCPStore(*link.store, link.count, timeout=timedelta(seconds=LOAD_TIMEOUT_S))
        self._group = _join(store, self._rank, link, self._host, self._device)

    def load_for(self, config: AppConfig, model_dir: Path) -> Follower:
        """As `load`, of a configuration's target. `ConfigError` where it does not fit into its GPU."""
        check_rank_fits(config, model_dir, self._rank, self._device)
        return self.load(target_spec(config, model_dir))

    def load(self, spec: TargetSpec) -> Follower:
        """This rank's shard, made while the others make theirs. Raises what loading raises."""
        group, receiver, link = self._group, self._receiver, self._link
        assert group is not None, "join() comes first"
        assert receiver is not None
        assert link is not None
        decoder = load_target(
            spec.model_dir,
            spec.dtype,
            spec.max_positions,
            spec.quantization,
            group,
            self._device,
            spec.kv_dtype,
        )
        _meet(group, link)
        return Follower(decoder, group, receiver)

    def _listen(self, link: RankLink) -> RankReceiver:
        place = link.readers.get(self._rank)
        if place is None:
            acks = connect(self._context, link.acks_address, num_messages=WAITING_MESSAGES)
            return WireReceiver(self._rank, self._inbox, acks)
        assert link.ring_name is not None
        return Ring.attach(link.ring_name).reader(place)

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        if self._group is not None:
            self._group.close()
        self._inbox.socket.close()


def check_rank_fits(config: AppConfig, model_dir: Path, rank: int, device: torch.device) -> None:
    """`ConfigError` that says what would fit, where this rank's part is larger than its GPU, or what the GPU
    cannot do."""
    check_kv_dtype(config, device)
    if device.type == "cuda":
        needs = device_needs(config, model_dir, rank)
        check_fits(needs, config, torch.cuda.mem_get_info(device)[0])


def _join(store: dist.TCPStore, rank: int, link: RankLink, host: str, device: torch.device) -> Group:
    return join_group(store, rank=rank, count=link.count, host=host, timeout_s=LOAD_TIMEOUT_S, device=device)


def _meet(group: Group, link: RankLink) -> None:
    """Until all have loaded; from here on, ranks wait for each other as long as a step may take."""
    group.sum(torch.zeros(1, device=group.device)).cpu()  # which waits, where the device did not
    group.set_timeout(link.step_timeout_s)
