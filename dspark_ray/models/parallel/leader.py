"""Rank 0's shard behind the interface of a whole decoder: each pass is told to the others, then made with
them. Who calls it decides everything, and does not know of them."""

import logging
from collections.abc import Callable, Collection, Sequence
from weakref import WeakKeyDictionary

import torch
from dspark_kernels.attention import PagedBatch
from dspark_kernels.linear import PackedLinear
from torch import Tensor

from dspark_ray.core.errors import CheckpointError, RankError
from dspark_ray.core.types import AdapterRef
from dspark_ray.models.collective import Group, highest_failed
from dspark_ray.models.kv import KVStorage
from dspark_ray.models.parallel.channel import RankSender, blame
from dspark_ray.models.parallel.journal import Journal
from dspark_ray.models.parallel.message import (
    AdapterMessage,
    ForwardMessage,
    HeadMessage,
    NewKVMessage,
    PackMessage,
    RankMessage,
    StopMessage,
    encode,
)
from dspark_ray.models.parallel.watch import DeviceWatch, Done
from dspark_ray.models.targets.config import DecoderConfig
from dspark_ray.models.targets.decoder import Decoder, DecoderOutput, Linear
from dspark_ray.models.targets.lora import Adapter, AdapterPack, AdapterRows
from dspark_ray.models.weights import WeightSource

logger = logging.getLogger(__name__)

HEAD_BYTES = 1 << 18  # of the states in one message, or one row's


class LeadingDecoder(Decoder):
    """The target as an engine and its drafter use it. Every call raises `RankError` when a rank is lost,
    naming it; nothing can be computed after that. On GPUs, where the host does not wait, the process ends
    instead."""

    can_be_captured = False  # the others are told of a pass when it is made, not when it is replayed

    def __init__(
        self,
        sender: RankSender,
        group: Group,
        config: DecoderConfig,
        source: WeightSource,
        dtype: torch.dtype,
        max_positions: int,
        linear: Linear = PackedLinear,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, source, dtype, max_positions, linear, group, kv_dtype)
        self.journal = Journal()
        self._sender, self._group = sender, group
        self._number = self._num_sums = 0
        self._is_lost = False
        # By the message that made each; what nobody here uses any more, the others drop with the next one.
        self._storages: WeakKeyDictionary[KVStorage, int] = WeakKeyDictionary()
        self._watch: DeviceWatch | None = None
        if group.waits_on_device:
            self._watch = DeviceWatch(group.timeout_s, self._culprit)
        group.on_enter = self._note_sum

    def new_kv(self, num_slots: int) -> KVStorage:
        kept = tuple(self._storages.values())
        self._tell(lambda number: NewKVMessage(number, num_slots, kept))
        kv = super().new_kv(num_slots)
        self._storages[kv] = self._number
        return kv

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv: KVStorage,
        slots: Tensor,
        batch: PagedBatch,
        taps: tuple[int, ...] = (),
        adapters: AdapterRows | None = None,
        logit_rows: Tensor | None = None,
    ) -> DecoderOutput:
        """As `Decoder.forward`. The others keep no taps: drafters are rank 0's."""
        storage, rows = self._storages[kv], None if adapters is None else adapters.adapters
        self._tell(
            lambda number: ForwardMessage(
                number, token_ids, positions, slots, batch, storage, logit_rows, rows
            )
        )
        try:
            out = super().forward(token_ids, positions, kv, slots, batch, taps, adapters, logit_rows)
        except RankError as error:
            raise self._blamed(error) from error
        if self._watch is not None:
            self._watch.note(_event(self.device))
        return out

    def share_adapter(self, ref: AdapterRef, max_rank: int) -> None:
        """The others read their parts of its files now, each on its own node; steps wait for them."""
        self._tell(lambda number: AdapterMessage(number, ref, max_rank))
        try:
            failed = highest_failed(self._group)
        except RankError as error:
            raise self._blamed(error) from error
        if failed is not None:
            raise CheckpointError(
                f"{ref.path}: rank {failed} cannot load this adapter, its log says why; every node needs the "
                "same files"
            )

    def pack_adapters(self, adapters: Sequence[Adapter], held: Collection[str]) -> AdapterPack:
        """As `Decoder.pack_adapters`, on every rank."""
        digests = tuple(adapter.ref.digest for adapter in adapters)
        self._tell(lambda number: PackMessage(number, digests, tuple(held)))
        return super().pack_adapters(adapters, held)

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Decoder.logits`, of states that every rank is sent."""
        rows = max(1, HEAD_BYTES // (self.config.hidden_size * self.dtype.itemsize))
        return torch.cat([self._told_logits(part) for part in hidden.split(rows)])

    def _told_logits(self, hidden: Tensor) -> Tensor:
        self._tell(lambda number: HeadMessage(number, hidden))
        try:
            return self._logits(hidden)
        except RankError as error:
            raise self._blamed(error) from error

    def stop(self) -> None:
        """Lets the other ranks end; they do so by themselves once one is lost."""
        if self._watch is not None:
            self._watch.close()
        if self._is_lost:
            return
        try:
            self._sender.send(encode(StopMessage(self._number + 1)))
        except RankError as error:
            logger.warning("a rank does not hear that this engine stops: %s", error)

    def _tell(self, message: Callable[[int], RankMessage]) -> None:
        self._number += 1
        told = message(self._number)
        payload = encode(told)
        self.journal.note(told, payload)
        try:
            self._sender.send(payload)
        except RankError as error:
            raise self._blamed(error) from error

    def _note_sum(self, number: int) -> None:
        self._num_sums = number

    def _blamed(self, error: RankError) -> RankError:
        self._is_lost = True
        found = self._culprit()
        logger.error("%s (%s); the last messages: %s", found, error, self.journal.tail())
        return RankError(f"{found} ({error})")

    def _culprit(self) -> str:
        return blame(self._sender.progress(), self._number, self._num_sums)


def _event(device: torch.device) -> Done:
    """Behind everything that was asked of the device."""
    return torch.cuda.current_stream(device).record_event()
