"""Choosing a block's tokens slot by slot, for requests of every kind together."""

from collections.abc import Sequence

import numpy as np
import torch
from dspark_kernels.choose import argmax
from dspark_kernels.noise import noisy_argmax
from torch import Tensor

from dspark_ray.core.types import FloatArray
from dspark_ray.models.adjust import Columns, adjust_draft_row
from dspark_ray.models.drafters.base import DraftRequest
from dspark_ray.models.sampling import SamplingRows, filtered_probs, sample_from, sampling_rows


class SlotChooser:
    """Logits as the requests' adjusters leave them, then the argmax, or a draw from q.

    q is the distribution after the request's own temperature and filters; with shared noise the draw takes
    the noise of the place that is drafted. Call `choose` once for each slot, left to right.
    """

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
        """The next slot's tokens. logits [R, Vd] fp32, changed in place by adjusters → target ids [R]"""
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
        """What was chosen. [R, n] target ids"""
        return torch.tensor(self._drafted)  # on the host

    def open_slots(self) -> Tensor:
        """Whether any token that can be drafted was allowed. [R, n] bool

        Where none was, a token stands in that is sure to be rejected, to be given no chance: to draft fewer
        tokens would tell the search over budgets about the values of those before.
        """
        return self._open_slots

    def features(self) -> FloatArray | None:
        """`distribution_features` of each slot [R, n, 2]; None unless wanted."""
        if not self._wants_features:
            return None
        return np.asarray(torch.stack(self._features, dim=1).cpu().numpy(), dtype=np.float32)

    def draft_probs(self) -> list[Tensor | None]:
        """q of each request [n, Vd] that the rejection rule needs it of; None: one-hot."""
        probs: list[Tensor | None] = [None] * len(self._requests)
        for index, row in enumerate(self._drawn):
            probs[row] = torch.stack([by_slot[index] for by_slot in self._probs])
        return probs


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
