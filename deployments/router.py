"""The request router on the handle from ingress to server: `dspark_ray.scheduling.router` behind Serve's API.

Runs in every ingress process, on its event loop. Loads come from `LLMServer.record_routing_stats`, at most a
period old; queue lengths are this process's own count.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from dspark_ray.core.types import Request
from dspark_ray.scheduling.load import ReplicaLoad
from dspark_ray.scheduling.router import Affinity, RoutedRequest, rank

STATS_KEY = "load"  # in a replica's routing stats


class GoodputRouter(FIFOMixin, RequestRouter):
    """Ranks replicas by the throughput that the request adds there."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called once by Serve, with the configured arguments: there are none."""
        self._affinity = Affinity()
        self._rng = random.Random()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All candidates, each a rank of its own: within a rank Serve would go by queue length."""
        if pending_request is not None:
            # Without it Serve asks again at once while all are full, and its event loop stands still.
            pending_request.routing_context.should_backoff = True
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = _Lookup(replicas, lambda replica: load_of(replica.routing_stats))
        num_here = _Lookup(replicas, self._num_at)
        request = routed_request(pending_request)
        cached = self._affinity.cached_tokens(request)
        return [[replicas[name]] for name in rank(loads, num_here, request, cached, self._rng)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._affinity.note(routed_request(pending_request), replica_id.unique_id)

    def _num_at(self, replica: RunningReplica) -> int:
        """Requests there now: as counted here, or as last reported."""
        counted = self.replica_queue_len_cache.get(replica.replica_id)
        if counted is not None:
            return int(counted)
        load = load_of(replica.routing_stats)
        return 0 if load is None else load.num_running + load.num_waiting


Value = TypeVar("Value")


class _Lookup(Mapping[str, Value]):
    """By replica, read when asked for."""

    def __init__(
        self, replicas: Mapping[str, RunningReplica], read: Callable[[RunningReplica], Value]
    ) -> None:
        self._replicas = replicas
        self._read = read

    def __getitem__(self, name: str) -> Value:
        return self._read(self._replicas[name])

    def __contains__(self, name: object) -> bool:
        return name in self._replicas

    def __iter__(self) -> Iterator[str]:
        return iter(self._replicas)

    def __len__(self) -> int:
        return len(self._replicas)


def load_of(routing_stats: dict[str, Any]) -> ReplicaLoad | None:
    """What a replica last reported; None for one that has not yet, or is of another version."""
    try:
        return ReplicaLoad(**routing_stats[STATS_KEY])
    except (KeyError, TypeError):
        return None


def routed_request(pending: PendingRequest | None) -> RoutedRequest:
    """The engine's request in a call of `LLMServer.generate`."""
    request = pending.args[0] if pending is not None and pending.args else None
    if not isinstance(request, Request):
        return RoutedRequest((), 1)
    prompt = (*request.prompt_token_ids, *request.emitted_token_ids)
    left = request.sampling.max_tokens - len(request.emitted_token_ids)
    adapter = "" if request.adapter is None else request.adapter.digest
    return RoutedRequest(prompt, left, request.session_key, adapter)
