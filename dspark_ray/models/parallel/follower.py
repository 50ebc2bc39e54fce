"""A rank that follows: carries out what rank 0 tells it, in order, and decides nothing."""

import logging
import threading

import torch

from dspark_ray.core.errors import CheckpointError, RankError
from dspark_ray.models.collective import Group, highest_failed
from dspark_ray.models.kv import KVStorage
from dspark_ray.models.parallel.channel import BEAT_S, RankReceiver
from dspark_ray.models.parallel.journal import Journal
from dspark_ray.models.parallel.message import (
    AdapterMessage,
    ForwardMessage,
    HeadMessage,
    NewKVMessage,
    PackMessage,
    RankMessage,
    StopMessage,
    decode,
)
from dspark_ray.models.targets.decoder import Decoder
from dspark_ray.models.targets.lora import Adapter, AdapterPack

logger = logging.getLogger(__name__)


class Follower:
    """`run()` until rank 0 stops it."""

    def __init__(self, decoder: Decoder, group: Group, receiver: RankReceiver) -> None:
        self.journal = Journal()
        self._decoder, self._receiver = decoder, receiver
        self._group, self._rank = group, group.rank
        self._adapters: dict[str, Adapter] = {}  # by digest
        self._pack: AdapterPack | None = None
        self._storages: dict[int, KVStorage] = {}  # by the number of the message that made each
        group.on_enter = receiver.note_sums

    @torch.inference_mode()
    def run(self) -> None:
        """Raises `RankError` when another rank is gone."""
        ended = threading.Event()
        beats = threading.Thread(target=self._beat, args=(ended,), name="dspark-beat", daemon=True)
        beats.start()
        try:
            self._follow()
        except RankError:
            logger.error("rank %d ends; its last messages: %s", self._rank, self.journal.tail())
            raise
        finally:
            ended.set()
            beats.join()

    def _follow(self) -> None:
        done = 0
        while True:
            payload = self._receiver.receive()
            message = decode(payload)
            self._receiver.note(message.number, done)
            if isinstance(message, StopMessage):
                return
            self.journal.note(message, payload)
            if message.number != done + 1:
                raise RankError(f"message {message.number} came after {done}")
            self._carry_out(message)
            done = message.number
            self._receiver.note(done, done)

    def _carry_out(self, message: RankMessage) -> None:
        match message:
            case ForwardMessage():
                device = self._decoder.device
                adapters = None
                if message.adapters is not None:
                    assert self._pack is not None, "a pack comes first"
                    adapters = self._pack.rows(message.adapters.to(device), self._decoder.dtype)
                self._decoder.forward(
                    message.token_ids.to(device),
                    message.positions.to(device),
                    self._storages[message.kv],
                    message.slots.to(device),
                    message.batch.to(device),
                    adapters=adapters,
                    logit_rows=None if message.logit_rows is None else message.logit_rows.to(device),
                )
            case HeadMessage():
                self._decoder.logits(message.hidden.to(self._decoder.device))
            case NewKVMessage():
                # Before the new one is made.
                self._storages = {n: kv for n, kv in self._storages.items() if n in message.kept}
                self._storages[message.number] = self._decoder.new_kv(message.num_slots)
            case AdapterMessage():
                highest_failed(self._group, not self._hold(message))
            case PackMessage():
                self._adapters = {d: one for d, one in self._adapters.items() if d in message.held}
                self._pack = self._decoder.pack_adapters(
                    [self._adapters[digest] for digest in message.digests], message.held
                )

    def _hold(self, message: AdapterMessage) -> bool:
        """Reads an adapter that is not held; False where it cannot be."""
        ref = message.ref
        if ref.digest not in self._adapters:
            try:
                self._adapters[ref.digest] = self._decoder.load_adapter(ref, message.max_rank)
            except CheckpointError as error:
                logger.error("rank %d cannot load the adapter %s: %s", self._rank, ref.name, error)
                return False
        return True

    def _beat(self, ended: threading.Event) -> None:
        self._receiver.beat()
        while not ended.wait(BEAT_S):
            self._receiver.beat()
