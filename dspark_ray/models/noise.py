"""The noise of a seeded choice: one key for each place of its output (kernels: `dspark_kernels.noise`).

Target and drafter draw the token at a place with the same noise, so a draft token stands iff it is the
target's own. What comes out depends on the model, the request and its seed, and on nothing else.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dspark_ray.core.types import AcceptanceRule, Request

# Between the counters of two places; far from every multiple of the step between two tokens' (2^39 for texts
# of four million tokens), so that no place repeats a stretch of another one's noise.
_STEP = np.uint64(0xD1342543DE82EF95)


class SharedNoise:
    """Keys by output position, emitted tokens included: a resumed request goes on where it was."""

    def __init__(self, seed: int, choice: int, prompt_token_ids: tuple[int, ...]) -> None:
        # The prompt too, so that requests of one seed are independent of each other.
        words = np.array([seed % 2**64, choice, *prompt_token_ids], dtype=np.uint64)
        digest = hashlib.sha256(words.astype("<u8").tobytes()).digest()
        self._key = np.uint64(int.from_bytes(digest[:8], "little"))

    @property
    def base(self) -> int:
        """What `keys_at` makes keys of; in int64."""
        return int(self._key.astype(np.int64))

    def keys(self, first: int, count: int) -> NDArray[np.int64]:
        """Of output positions `first` … `first + count − 1`. [count]"""
        places = np.arange(first + 1, first + count + 1, dtype=np.uint64)
        return (self._key + places * _STEP).view(np.int64)


def keys_at(bases: Tensor, places: Tensor) -> Tensor:
    """Keys of output positions that only a device knows. int64, broadcast; numbers wrap, as the host's do"""
    return bases + (places + 1) * int(_STEP.astype(np.int64))


def shared_noise(request: Request) -> SharedNoise | None:
    """None for requests whose rule is another one."""
    sampling = request.sampling
    if sampling.rule is not AcceptanceRule.SHARED_NOISE or sampling.seed is None:
        return None
    return SharedNoise(sampling.seed, sampling.choice, request.prompt_token_ids)
