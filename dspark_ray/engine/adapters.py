"""The LoRA adapters that an engine holds: loaded beside the step loop, evicted when the least used."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch

from dspark_ray.core.config import LoraConfig
from dspark_ray.core.errors import CheckpointError, QueueFullError, RequestError
from dspark_ray.core.types import AdapterRef, Request
from dspark_ray.engine.batch import Work
from dspark_ray.models.targets.decoder import Decoder
from dspark_ray.models.targets.lora import NO_ADAPTER, Adapter, AdapterPack, AdapterRows


class Adapters:
    """At most `lora.max_loaded` at a time. Loading is for any thread, the rest is the step loop's."""

    def __init__(self, config: LoraConfig, target: Decoder) -> None:
        self._config = config
        self._target = target
        self._lock = threading.Lock()  # of what is held; never kept while files are read
        self._held: OrderedDict[str, Adapter] = OrderedDict()  # by digest, least recently used first
        self._num_users: Counter[str] = Counter()  # by digest: requests that have not ended
        self._pack: AdapterPack | None = None
        self._shared: set[str] = set()  # digests that the target's other ranks hold, too

    def load(self, ref: AdapterRef) -> None:
        """Reads it if it is not held. Raises `RequestError` for an adapter that cannot be served."""
        with self._lock:
            if ref.digest in self._held:
                return
        try:
            adapter = self._target.load_adapter(ref, self._config.max_rank)
        except CheckpointError as error:
            raise _refused(error) from error
        with self._lock:
            self._held[ref.digest] = adapter
            self._evict(self._config.max_loaded)

    def slow_work(self, request: Request) -> Callable[[], object] | None:
        """What makes this request quick to add; None: it is already. The work may raise `RequestError`."""
        adapter = request.adapter
        if adapter is None or adapter.digest in self._held:
            return None
        return lambda: self.load(adapter)

    def acquire(self, ref: AdapterRef | None) -> None:
        """A request of this adapter, or of none, begins: it stays until `release`. Raises `RequestError`, or
        `QueueFullError` where the requests that run use as many others as may be held.
        """
        if ref is None:
            return
        self.load(ref)
        with self._lock:
            if ref.digest not in self._held:
                raise QueueFullError(
                    f"all {self._config.max_loaded} adapters that may be loaded are in use; try again later"
                )
            self._num_users[ref.digest] += 1
            self._held.move_to_end(ref.digest)
        try:
            self._share(ref)
        except RequestError:
            self.release(ref)
            raise

    def make_ready(self, ref: AdapterRef) -> None:
        """Loaded, by every rank, before anybody asks for it. Raises what `acquire` raises."""
        self.acquire(ref)
        self.release(ref)

    def _share(self, ref: AdapterRef) -> None:
        """With the target's other ranks, once for as long as it is held."""
        if ref.digest in self._shared:
            return
        try:
            self._target.share_adapter(ref, self._config.max_rank)
        except CheckpointError as error:
            raise _refused(error) from error
        self._shared.add(ref.digest)

    def release(self, ref: AdapterRef | None) -> None:
        """The request has ended."""
        if ref is not None:
            with self._lock:
                self._num_users[ref.digest] -= 1

    def forget(self, digest: str) -> None:
        """It is not served any more: what it holds is freed, or becomes the first to be once it is unused."""
        with self._lock:
            if digest in self._held:
                self._held.move_to_end(digest, last=False)
                if not self._num_users[digest]:
                    del self._held[digest]
            self._pack = None  # it may hold the weights, too

    def held(self) -> list[str]:
        """Names, least recently used first."""
        with self._lock:
            return [adapter.ref.name for adapter in self._held.values()]

    def rows(self, work: Seq[Work]) -> AdapterRows | None:
        """For the batch of this work; None, at no cost, where no request of it has an adapter."""
        digests = [None if (ref := w.sequence.request.adapter) is None else ref.digest for w in work]
        used = {digest for digest in digests if digest is not None}
        if not used:
            return None
        pack = self._packed(used)
        places = {digest: place for place, digest in enumerate(pack.digests)}
        per_request = [NO_ADAPTER if digest is None else places[digest] for digest in digests]
        rows = np.repeat(per_request, [w.num_rows for w in work])
        return pack.rows(torch.from_numpy(rows).to(self._target.device), self._target.dtype)

    def _packed(self, used: set[str]) -> AdapterPack:
        """The last pack while it holds what is used and not much else: requests come and go every step."""
        with self._lock:
            adapters = [adapter for digest, adapter in self._held.items() if digest in used]
            held = list(self._held)
        rank = sum(adapter.rank for adapter in adapters)
        pack = self._pack
        if pack is None or not used.issubset(pack.digests) or pack.total_rank > 2 * rank:
            pack = self._pack = self._target.pack_adapters(adapters, held)
            self._shared.intersection_update(held)
        return pack

    def _evict(self, limit: int) -> None:
        for digest in [d for d in self._held if not self._num_users[d]]:
            if len(self._held) <= limit:
                return
            del self._held[digest]


def _refused(error: CheckpointError) -> RequestError:
    return RequestError(str(error), param="model", code="invalid_adapter")
