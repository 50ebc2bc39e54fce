"""Choosing a block's tokens slot by slot, for requests of every kind together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from dspark_kernels.choose import argmax
from dspark_kernels.noise import noisy_argmax
from numpy.typing import NDArray
from torch import Tensor

from dspark_ray.models.adjust import Columns, adjust_draft_row
from dspark_ray.models.drafters.base import DraftRequest
from dspark_ray.models.sampling import SamplingRows, filtered_probs, sample_from, sampling_rows
from dspark_ray.models.transfer import arrays_to_device


class Chooser(Protocol):
    """The tokens of a block: the argmax, or a draw from q.

    q is the distribution after the request's own temperature and filters; with shared noise the draw takes
    the noise of the place that is drafted.
    """

    def choose(self, logits: Tensor) -> Tensor:
        """The next slot's tokens; called once for each slot, left to right. logits [R, Vd] fp32, which are
        the chooser's now → target ids [R], beside them"""

    def token_ids(self) -> Tensor:
        """What was chosen. [R, n] target ids, on the host or the device"""

    def open_slots(self) -> Tensor:
        """Whether any token that can be drafted was allowed. [R, n] bool, on the host

        Where none was, a token stands in that is sure to be rejected, to be given no chance: to draft fewer
        tokens would tell the search over budgets about the values of those before.
        """

    def features(self) -> Tensor | None:
        """`distribution_features` of each slot [R, n, 2], beside the logits; None unless wanted."""

    def draft_probs(self) -> list[Tensor | None]:
        """q of each request [n, Vd] that the rejection rule needs it of; None: one-hot."""


class HostChooser:
    """With adjusters, which shape logits on the host: each slot's tokens are read before the next."""

    def __init__(
        self,
        requests: Sequence[DraftRequest],
        vocab_map: Tensor | None,
        output_size: int,
        device: torch.device,
        *,
        wants_features: bool = False,
    ) -> None:
        self._requests, self._vocab_map = requests, vocab_map
        adjusts = any(r.adjuster is not None for r in requests)
        self._columns = Columns(vocab_map.cpu() if adjusts and vocab_map is not None else None)
        self._shared = [i for i, r in enumerate(requests) if r.noise_keys is not None]
        self._drawn = [i for i, r in enumerate(requests) if not r.sampling.greedy and r.noise_keys is None]
        self._shared_filters = self._filters(self._shared, output_size, device)
        self._drawn_filters = self._filters(self._drawn, output_size, device)
        uniforms = np.stack([r.uniforms for r in requests])
        self._uniforms = torch.from_numpy(uniforms[self._drawn]).to(device)  # [D, n]
        keys = [r.noise_keys for r in requests if r.noise_keys is not None]
        self._keys = torch.from_numpy(np.array(keys, dtype=np.int64)).to(device)  # [S, n]
        self._drafted: list[list[int]] = [[] for _ in requests]
        self._open_slots = torch.ones(uniforms.shape, dtype=torch.bool)  # on the host
        self._probs: list[Tensor] = []  # per slot [D, Vd]
        self._features: list[Tensor] = []  # per slot [R, 2]
        self._wants_features = wants_features

    def _filters(self, of: Sequence[int], output_size: int, device: torch.device) -> SamplingRows:
        return sampling_rows([self._requests[i].sampling for i in of], output_size, device)

    def choose(self, logits: Tensor) -> Tensor:
        slot = len(self._drafted[0])
        for row, request in enumerate(self._requests):
            if request.adjuster is not None:
                self._open_slots[row, slot] = adjust_draft_row(
                    logits[row], request.adjuster, self._drafted[row], self._columns
                )
        if self._wants_features:
            self._features.append(distribution_features(logits))
        chosen = argmax(logits)
        if self._shared:
            probs = filtered_probs(logits[self._shared], self._shared_filters)
            chosen[self._shared] = noisy_argmax(probs, self._keys[:, slot], self._vocab_map)
        if self._drawn:
            self._probs.append(filtered_probs(logits[self._drawn], self._drawn_filters))
            chosen[self._drawn] = sample_from(self._probs[-1], self._uniforms[:, slot])
        tokens = chosen if self._vocab_map is None else self._vocab_map[chosen]
        for drafted, token in zip(self._drafted, tokens.tolist(), strict=True):
            drafted.append(token)
        return tokens

    def token_ids(self) -> Tensor:
        return torch.tensor(self._drafted)

    def open_slots(self) -> Tensor:
        return self._open_slots

    def features(self) -> Tensor | None:
        return torch.stack(self._features, dim=1) if self._wants_features else None

    def draft_probs(self) -> list[Tensor | None]:
        probs: list[Tensor | None] = [None] * len(self._requests)
        for index, row in enumerate(self._drawn):
            probs[row] = torch.stack([by_slot[index] for by_slot in self._probs])
        return probs


@dataclass(frozen=True, slots=True)
class Draws:
    """What the S sampled ones of R requests draw with, on the device."""

    filters: SamplingRows  # [S]
    keys: Tensor  # [n, S] int64 of the draws (dspark_kernels.noise)
    rows: Tensor | None  # [S] int64, which of the requests they are; None: all


class SlotChooser:
    """Greedy choices and draws without adjusters, and nothing is read back: a slot's tokens stay where the
    next slot's bias needs them.

    A draw is the winner of a race (dspark_kernels.noise) for every request that is not greedy; without
    shared noise its key comes from the request's random number for the slot.
    """

    def __init__(self, draws: Draws | None, vocab_map: Tensor | None, *, keeps_probs: bool) -> None:
        """`keeps_probs`: somebody needs its q."""
        self._draws, self._vocab_map, self._keeps_probs = draws, vocab_map, keeps_probs
        self._tokens: list[Tensor] = []  # per slot [R]
        self._probs: list[Tensor] = []  # per slot [S, Vd]

    def choose(self, logits: Tensor) -> Tensor:
        """As `Chooser.choose`."""
        chosen = self._choose(logits)
        self._tokens.append(chosen if self._vocab_map is None else self._vocab_map[chosen])
        return self._tokens[-1]

    def _choose(self, logits: Tensor) -> Tensor:
        draws = self._draws
        if draws is None:
            return argmax(logits)
        own = logits if draws.rows is None else logits.index_select(0, draws.rows)
        probs = filtered_probs(own, draws.filters)
        drawn = noisy_argmax(probs, draws.keys[len(self._tokens)], self._vocab_map)
        if self._keeps_probs:
            self._probs.append(probs)
        return drawn if draws.rows is None else argmax(logits).index_copy_(0, draws.rows, drawn)

    def token_ids(self) -> Tensor:
        """[R, n] target ids"""
        return torch.stack(self._tokens, dim=1)

    def probs(self) -> Tensor | None:
        """q of every slot of the sampled requests [S, n, Vd], where it is kept."""
        return torch.stack(self._probs, dim=1) if self._probs else None


class DeviceChooser:
    """Without adjusters: `SlotChooser` for requests that the host knows."""

    def __init__(
        self,
        requests: Sequence[DraftRequest],
        vocab_map: Tensor | None,
        output_size: int,
        device: torch.device,
        *,
        wants_features: bool = False,
    ) -> None:
        self._shape = len(requests), len(requests[0].uniforms)
        self._wants_features = wants_features
        sampled = [i for i, r in enumerate(requests) if not r.sampling.greedy]
        # By request that needs its q: its place among the sampled ones.
        self._drawn = {i: place for place, i in enumerate(sampled) if requests[i].noise_keys is None}
        draws = None
        if sampled:
            keys = np.stack([_keys(requests[i]) for i in sampled], axis=1)  # [n, S]
            placed, rows = arrays_to_device(device, keys, np.array(sampled))
            filters = sampling_rows([requests[i].sampling for i in sampled], output_size, device)
            draws = Draws(filters, placed, None if len(sampled) == len(requests) else rows)
        self._slots = SlotChooser(draws, vocab_map, keeps_probs=bool(self._drawn))
        self._features: list[Tensor] = []  # per slot [R, 2]

    def choose(self, logits: Tensor) -> Tensor:
        if self._wants_features:
            self._features.append(distribution_features(logits))
        return self._slots.choose(logits)

    def token_ids(self) -> Tensor:
        return self._slots.token_ids()

    def open_slots(self) -> Tensor:
        return torch.ones(self._shape, dtype=torch.bool)

    def features(self) -> Tensor | None:
        return torch.stack(self._features, dim=1) if self._wants_features else None

    def draft_probs(self) -> list[Tensor | None]:
        probs: list[Tensor | None] = [None] * self._shape[0]
        by_request = self._slots.probs()
        if by_request is not None:
            for index, place in self._drawn.items():
                probs[index] = by_request[place]
        return probs


def _keys(request: DraftRequest) -> NDArray[np.int64]:
    """Of the draws [n]: the noise of their places, or 53 random bits each."""
    return keys_of(request.uniforms) if request.noise_keys is None else request.noise_keys


def keys_of(uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
    """Draws' keys from random numbers in [0, 1)."""
    return (uniforms * 2.0**64).astype(np.uint64).view(np.int64)


_MAX_MARGIN = 20.0  # nats; an adjuster may leave one token only


def distribution_features(logits: Tensor) -> Tensor:
    """How sure the draft distribution is: top-2 margin and entropy, both in nats. [R, Vd] → [R, 2]

    Of the logits at temperature 1, so that they mean the same for every request. They know nothing of which
    token is then drawn.
    """
    probs = logits.softmax(dim=-1)
    first, second = logits.topk(2, dim=-1).values.unbind(-1)
    margin = (first - second).clamp(max=_MAX_MARGIN)
    return torch.stack((margin, torch.special.entr(probs).sum(-1)), dim=-1)
