"""Where the next request adds most throughput: one score in tokens per second, on stale statistics.

score = what the replica's throughput gains with one more request
      − the tokens that others lose while its prompt is prefilled, over its life; cached tokens cost nothing
      − its own tokens' delay by that prefill and by the wait for a place or for KV blocks.

Prefix-cache affinity and session stickiness are both cached tokens of the second term. Loads are some
hundred milliseconds old, so each request looks at a few replicas by chance, beside those that have its
beginning: always taking the best of all would send every request of that time to one of them.
"""

import hashlib
import random
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from dspark_ray.scheduling.load import ReplicaLoad

CHUNK_TOKENS = 64  # beginnings are compared in steps of so many tokens
MAX_CHUNKS = 64  # of one prompt: what lies beyond is not looked at
MAX_KNOWN = 100_000  # beginnings and sessions remembered
NUM_CHOICES = 4  # by chance; with two, an unequal fleet's slow replicas are too often the better of a pair
LATE = 2.0  # tokens/s that one token counts for each second that it comes later
EXPECTED_TOKENS = 256  # a request that may emit more is expected to emit so many


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What the score looks at."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    session_key: str = ""
    adapter: str = ""  # digest: requests of two adapters share no cached beginning

    @property
    def expected_tokens(self) -> int:
        return max(1, min(self.max_tokens, EXPECTED_TOKENS))


def score(load: ReplicaLoad, num_here: int, request: RoutedRequest, cached_tokens: int) -> float:
    """Tokens per second that the fleet gains by sending `request` there. num_here: its requests now, of all
    kinds, as the caller knows better than an old report.
    """
    prompt, output = len(request.prompt_token_ids), request.expected_tokens
    running = min(num_here, load.max_running)
    own_speed = load.tokens_per_s(running + 1) / (running + 1)
    if own_speed <= 0:
        return 0.0
    life_s = output / own_speed
    prefill_s = load.prefill_ms_per_token * max(prompt - cached_tokens, 0) / 1e3
    lost_by_others = running * own_speed * prefill_s / life_s
    needs_blocks = prompt - cached_tokens + output > load.free_tokens
    num_before = max(num_here - load.max_running + 1, int(needs_blocks and num_here > 0), 0)
    # Places come free at the rate at which requests end; nothing is gained before. By the wait itself, not by
    # what the request's own speed there makes of it: else slow replicas would have the longest queues.
    wait_s = num_before * output / max(load.tokens_per_s(running), own_speed)
    gain = 0.0 if num_before else load.tokens_per_s(running + 1) - load.tokens_per_s(running)
    return gain - lost_by_others - LATE * output * (prefill_s + wait_s)


class Affinity:
    """Which replica was sent which beginnings and sessions: a guess at what their caches hold.

    A replica that evicted them is a wrong guess that costs a prefill, as any other replica would have.
    """

    def __init__(self, max_known: int = MAX_KNOWN) -> None:
        self._max_known = max_known
        self._chunks: OrderedDict[bytes, str] = OrderedDict()  # digest of a beginning → the last replica
        self._sessions: OrderedDict[str, tuple[str, int]] = OrderedDict()  # → replica, tokens of its prompt

    def cached_tokens(self, request: RoutedRequest) -> dict[str, int]:
        """Tokens of the prompt that replicas should have, by replica; those without any are left out."""
        found: dict[str, int] = {}
        for number, digest in enumerate(_digests(request), start=1):
            replica = self._chunks.get(digest)
            if replica is None:
                break
            found[replica] = number * CHUNK_TOKENS
        if request.session_key in self._sessions:
            replica, num_tokens = self._sessions[request.session_key]
            known = min(num_tokens, len(request.prompt_token_ids))
            found[replica] = max(found.get(replica, 0), known)
        return found

    def note(self, request: RoutedRequest, replica: str) -> None:
        """`request` was sent to `replica`."""
        for digest in _digests(request):
            _remember(self._chunks, digest, replica, self._max_known)
        if request.session_key:
            known = (replica, len(request.prompt_token_ids))
            _remember(self._sessions, request.session_key, known, self._max_known)


def rank(
    loads: Mapping[str, ReplicaLoad | None],
    num_here: Mapping[str, int],
    request: RoutedRequest,
    cached_tokens: Mapping[str, int],
    rng: random.Random,
) -> list[str]:
    """All replicas, best first: a few by chance and those with cached tokens by score, then the others from a
    place by chance. loads: None for a replica that has not reported; it counts as the first that has, as
    one does that knows no rates yet. Never
    empty unless `loads` is. Loads and numbers are looked up only where the score asks for them: in a fleet of
    a thousand they would take longer than the score.
    """
    names = list(loads)
    chosen = rng.sample(names, min(NUM_CHOICES, len(names)))
    chosen += [name for name in cached_tokens if name in loads and name not in chosen]

    def worth(name: str) -> tuple[float, int]:
        load = loads[name]
        if load is None or not load.rates:
            load = next((one for one in loads.values() if one is not None and one.rates), None)
        if load is None:
            return 0.0, -num_here[name]
        return score(load, num_here[name], request, cached_tokens.get(name, 0)), -num_here[name]

    start = rng.randrange(len(names)) if names else 0
    others = [name for name in (*names[start:], *names[:start]) if name not in chosen]
    return sorted(chosen, key=worth, reverse=True) + others


def _digests(request: RoutedRequest) -> list[bytes]:
    """One digest per beginning of the prompt, each over the adapter and all tokens before it."""
    token_ids = request.prompt_token_ids
    hasher, digests = hashlib.blake2b(request.adapter.encode(), digest_size=16), []
    for start in range(0, min(len(token_ids) // CHUNK_TOKENS, MAX_CHUNKS) * CHUNK_TOKENS, CHUNK_TOKENS):
        hasher.update(np.asarray(token_ids[start : start + CHUNK_TOKENS], dtype=np.int64).tobytes())
        digests.append(hasher.digest())
    return digests


Key = TypeVar("Key")
Value = TypeVar("Value")


def _remember(known: OrderedDict[Key, Value], key: Key, value: Value, limit: int) -> None:
    known[key] = value
    known.move_to_end(key)
    while len(known) > limit:
        known.popitem(last=False)
