"""Losses against values computed by hand, and the closed-form gradient against autograd."""

import math

import pytest
import torch
from torch import Tensor

from dspark_ray.training.losses import LossWeights, agreement, dspark_loss, position_weights


def test_agreement_by_hand() -> None:
    # q = (.5, .25, .25) over draft ids 0..2; the target says id 0 with .3, a token that the drafter does not
    # know with .4, id 2 with .2; .1 is its tail. q's tail is .25 (id 1).
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log() + 3.0
    agreed = agreement(logits, torch.tensor([[0, -1, 2]]), torch.tensor([[0.3, 0.4, 0.2]]))
    assert agreed.overlap.item() == pytest.approx(0.3 + 0.0 + 0.2 + min(0.1, 0.25))
    assert agreed.cross_entropy.item() == pytest.approx(-(0.3 * math.log(0.5) + 0.2 * math.log(0.25)))


def test_equal_distributions_overlap_fully() -> None:
    logits = torch.randn(5, 16)
    probs, ids = logits.softmax(-1).topk(4)
    assert agreement(logits, ids, probs).overlap == pytest.approx(torch.ones(5))


def test_gradient_equals_autograd() -> None:
    torch.manual_seed(0)
    rows, vocab, k = 150, 50, 6  # several slices of rows
    ids = torch.stack([torch.randperm(vocab)[:k] for _ in range(rows)])
    ids[::2, 1] = -1
    probs = torch.rand(rows, k).softmax(-1) * torch.rand(rows, 1)
    upstream = torch.randn(2, rows)

    def by_autograd(logits: Tensor) -> tuple[Tensor, Tensor]:
        known = ids >= 0
        log_q = logits.log_softmax(-1).gather(1, ids.clamp(min=0))
        q = log_q.exp() * known
        tails = torch.minimum(1 - probs.sum(-1), 1 - q.sum(-1))
        return torch.minimum(probs, q).sum(-1) + tails, -(probs * log_q * known).sum(-1)

    logits = torch.randn(rows, vocab, requires_grad=True)
    overlap, cross_entropy = by_autograd(logits)
    (expected,) = torch.autograd.grad((upstream * torch.stack((overlap, cross_entropy))).sum(), logits)
    agreed = agreement(logits, ids, probs)
    (actual,) = torch.autograd.grad(
        (upstream * torch.stack((agreed.overlap, agreed.cross_entropy))).sum(), logits
    )
    torch.testing.assert_close(agreed.overlap, overlap)
    torch.testing.assert_close(agreed.cross_entropy, cross_entropy)
    torch.testing.assert_close(actual, expected)


def test_position_weights() -> None:
    assert position_weights(3, 4.0).tolist() == pytest.approx([1.0, math.exp(-0.25), math.exp(-0.5)])


def test_total_loss_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
    agreed = agreement(logits, torch.tensor([[0], [1]]), torch.tensor([[0.3], [0.9]]))
    # Tails of the target: .7 and .1; of the drafter: .5 and .2.
    overlaps = [0.3 + 0.5, 0.8 + 0.1]
    weights = [1.0, 0.5]
    confidence_logit = torch.tensor([0.0, 1.0])

    def bce(label: float, logit: float) -> float:
        chance = 1 / (1 + math.exp(-logit))
        return -(label * math.log(chance) + (1 - label) * math.log(1 - chance))

    cross_entropy = (1.0 * -0.3 * math.log(0.5) + 0.5 * -0.9 * math.log(0.8)) / 1.5
    variation = sum(w * 2 * (1 - o) for w, o in zip(weights, overlaps, strict=True)) / 1.5
    confidence = (1.0 * bce(0.8, 0.0) + 0.5 * bce(0.9, 1.0)) / 1.5
    parts = dspark_loss(agreed, confidence_logit, torch.tensor(weights), LossWeights())
    assert parts.cross_entropy == pytest.approx(cross_entropy, rel=1e-5)
    assert parts.total_variation == pytest.approx(variation, rel=1e-5)
    assert parts.confidence == pytest.approx(confidence, rel=1e-5)
    expected = 0.1 * cross_entropy + 0.9 * variation + 1.0 * confidence
    assert parts.total.item() == pytest.approx(expected, rel=1e-5)


def test_confidence_label_carries_no_gradient_to_the_logits() -> None:
    logits = torch.randn(4, 8, requires_grad=True)
    agreed = agreement(logits, torch.zeros(4, 1, dtype=torch.int64), torch.full((4, 1), 0.5))
    weights = LossWeights(cross_entropy=0.0, total_variation=0.0)
    confidence_logit = torch.randn(4, requires_grad=True)
    dspark_loss(agreed, confidence_logit, torch.ones(4), weights).total.backward()
    assert logits.grad is None or not logits.grad.any()
    assert confidence_logit.grad is not None
