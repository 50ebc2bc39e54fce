"""From logits to the distribution that is sampled, and from uniforms to tokens. All rows at once.

p and q are the distributions *after* temperature, top-k, top-p and min-p (dspark-method: acceptance
is exact only for the distributions really used), so target and drafter both come through here.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from dspark_kernels import sampling as kernels
from torch import Tensor

from dspark_ray.core.types import SamplingParams
from dspark_ray.models.transfer import to_device


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of N sampled (not greedy) rows as columns."""

    temperature: Tensor  # [N, 1] > 0
    top_k: Tensor | None  # [N, 1] int64; None when no row uses it
    top_p: Tensor | None  # [N, 1]
    min_p: Tensor | None  # [N, 1]

    def select(self, index: Tensor) -> "SamplingRows":
        """Rows at `index` [M], repeated where `index` repeats."""

        def pick(column: Tensor | None) -> Tensor | None:
            return None if column is None else column[index]

        return SamplingRows(self.temperature[index], pick(self.top_k), pick(self.top_p), pick(self.min_p))


def sampling_rows(
    params: Seq[SamplingParams], vocab_size: int, device: torch.device | None = None
) -> SamplingRows:
    """Columns for `filtered_probs`; filters that no row uses cost nothing."""

    def column(values: Seq[float], used: bool, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return to_device(torch.tensor(values, dtype=dtype).unsqueeze(1), device) if used else None

    top_k = [min(p.top_k or vocab_size, vocab_size) for p in params]
    temperature = column([p.temperature for p in params], used=True)
    assert temperature is not None
    return SamplingRows(
        temperature=temperature,
        top_k=column(top_k, any(k < vocab_size for k in top_k), torch.int64),
        top_p=column([p.top_p for p in params], any(p.top_p < 1.0 for p in params)),
        min_p=column([p.min_p for p in params], any(p.min_p > 0.0 for p in params)),
    )


def filtered_probs(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Temperature, then top-k, top-p and min-p, renormalised. [N, V] any float → [N, V] float32.

    The order is vLLM's. Top-p keeps the smallest set of most likely tokens whose mass reaches p (never
    fewer than one, ties at its edge together); min-p keeps tokens of at least min_p × the largest.
    """
    return kernels.filtered_probs(logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p)


def sample_from(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF sampling: [N, V] non-negative weights and uniforms [N] in [0, 1) → token ids [N]."""
    return kernels.inverse_cdf(probs, uniforms)
