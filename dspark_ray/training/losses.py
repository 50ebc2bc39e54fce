"""The DSpark loss: 0.1 · CE + 0.9 · TV + 1.0 · BCE(confidence), weighted by position.

The target is known by its top-K probabilities; everything else is one bucket, the tail. The drafter's
probabilities are over its reduced vocabulary: a target token outside it has draft probability zero.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_SLICE_ROWS = 64  # rows of logits handled at a time: 2 MB in fp32 at a vocabulary of 8192


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Weights of the three terms, and γ' of the position weight exp(−(k−1)/γ')."""

    cross_entropy: float = 0.1
    total_variation: float = 0.9
    confidence: float = 1.0
    position_decay: float = 4.0


@dataclass(frozen=True, slots=True)
class Agreement:
    """How the draft distribution q meets the target's p, per row."""

    overlap: Tensor  # [M] Σ_v min(p, q) = 1 − ½‖p − q‖₁: the chance that rejection sampling accepts
    cross_entropy: Tensor  # [M] −Σ p log q over the tokens both know


def agreement(logits: Tensor, draft_ids: Tensor, probs: Tensor) -> Agreement:
    """Overlap and cross-entropy of q = softmax(logits) with the target.

    Args: logits [M, Vd]; draft_ids [M, K] draft-vocabulary ids of the target's top tokens, −1 outside it;
    probs [M, K] their target probabilities. The tails overlap by at most the smaller of them, which is
    what is taken: with K in the tens the error is far below the loss's own noise.
    """
    return Agreement(*_Agreement.apply(logits, draft_ids, probs))


class _Agreement(torch.autograd.Function):
    """Overlap and cross-entropy with their gradient in closed form.

    Autograd would walk the [M, Vd] logits a dozen times; here it is two passes, in slices that stay in cache.
    With s_j = [q_j < p_j] − [q_tail < p_tail]:  ∂overlap/∂z_j = s_j q_j − q_j Σ_k s_k q_k  and
    ∂CE/∂z_j = q_j Σ_k p_k − p_j, sums over known top tokens, s and p zero elsewhere.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, draft_ids: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        known = draft_ids >= 0
        ids = draft_ids.clamp(min=0)
        log_z = torch.cat([rows.float().logsumexp(-1) for rows in logits.split(_SLICE_ROWS)])
        log_q = logits.gather(1, ids).float() - log_z[:, None]
        q = log_q.exp() * known
        target_tail = (1.0 - probs.sum(-1)).clamp(min=0.0)
        draft_tail = (1.0 - q.sum(-1)).clamp(min=0.0)
        ctx.save_for_backward(logits, ids, probs * known, log_z, q, target_tail, draft_tail)
        overlap = torch.minimum(probs, q).sum(-1) + torch.minimum(target_tail, draft_tail)
        return overlap, -(probs * log_q * known).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad_overlap: Tensor, grad_ce: Tensor) -> tuple[Tensor, None, None]:
        logits, ids, probs, log_z, q, target_tail, draft_tail = ctx.saved_tensors
        signed_q = q * ((q < probs).float() - (draft_tail < target_tail).float()[:, None])
        at_top = grad_overlap[:, None] * signed_q - grad_ce[:, None] * probs
        share = grad_ce * probs.sum(-1) - grad_overlap * signed_q.sum(-1)
        grad = torch.empty_like(logits)
        for start in range(0, len(logits), _SLICE_ROWS):
            rows = slice(start, start + _SLICE_ROWS)
            part = (logits[rows].float() - log_z[rows, None]).exp_().mul_(share[rows, None])
            grad[rows] = part.scatter_add_(1, ids[rows], at_top[rows])
        return grad, None, None


def position_weights(block_size: int, decay: float) -> Tensor:
    """w_k = exp(−(k−1)/γ') for k = 1..γ. [γ]"""
    return torch.exp(-torch.arange(block_size, dtype=torch.float32) / decay)


@dataclass(frozen=True, slots=True)
class LossParts:
    """Weighted means over the rows; `total` carries the gradient."""

    total: Tensor
    cross_entropy: float
    total_variation: float  # ‖p − q‖₁, 0..2
    confidence: float


def dspark_loss(
    agreed: Agreement,
    confidence_logit: Tensor | None,
    row_weights: Tensor,
    weights: LossWeights,
    total_weight: Tensor | None = None,
) -> LossParts:
    """All rows' loss. agreed and confidence_logit [M]; row_weights [M], the position weights of the rows.

    `total_weight`: of the rows of a whole step where these are a part of them; the parts' losses then add up
    to the loss of the step, and their gradients to its gradient.
    """
    share = row_weights / (row_weights.sum() if total_weight is None else total_weight)
    cross_entropy = (agreed.cross_entropy * share).sum()
    variation = (2.0 * (1.0 - agreed.overlap) * share).sum()
    total = weights.cross_entropy * cross_entropy + weights.total_variation * variation
    confidence = torch.zeros(())
    if confidence_logit is not None:
        label = agreed.overlap.detach().clamp(0.0, 1.0)
        rows = F.binary_cross_entropy_with_logits(confidence_logit.float(), label, reduction="none")
        confidence = (rows * share).sum()
        total = total + weights.confidence * confidence
    return LossParts(total, cross_entropy.item(), variation.item(), confidence.item())
