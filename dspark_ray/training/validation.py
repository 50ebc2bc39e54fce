"""Accepted length on held-out sequences, without running the engine.

Teacher forcing is exact for greedy decoding on greedy responses: up to the first mismatch the drafter's own
tokens are the response's. For sampling it is the expectation Σ_k Π_{i≤k} (1 − TV_i) along the response.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_ray.models.drafters.families import DrafterNetwork
from dspark_ray.training.anchors import TrainingBatch, pack
from dspark_ray.training.cache import CachedSequence
from dspark_ray.training.forward import SharedWeights, run_blocks
from dspark_ray.training.losses import agreement


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """τ counts the bonus token; acceptance is conditional on all earlier slots, per slot [γ]."""

    tau_sampling: float  # expected at temperature 1, mean over anchors
    tau_greedy: float  # tokens per step of a greedy walk over the greedy responses; nan without any
    acceptance_sampling: list[float]
    acceptance_greedy: list[float]
    confidence_error: float  # mean |σ(confidence) − overlap|


def greedy_walk(accepted: Tensor) -> tuple[int, int]:
    """Tokens and steps of decoding one response. accepted [R−1]: drafts accepted from each anchor."""
    position = steps = 0
    while position < len(accepted):
        position += int(accepted[position]) + 1
        steps += 1
    return len(accepted), steps


def _per_slot(batch: TrainingBatch, rows: Tensor) -> Tensor:
    """Row values back in block shape [N · A, γ], zero where there is no label."""
    full = torch.zeros(batch.valid.numel())
    full[batch.valid.flatten()] = rows.float()
    return full.view(-1, batch.valid.shape[-1])


def _conditional(chains: Tensor, reached: Tensor) -> list[float]:
    """Σ chance that slot k is accepted / Σ chance that it is reached."""
    return (chains.sum(0) / reached.sum(0).clamp(min=1e-9)).tolist()


@torch.no_grad()
def validate(
    network: DrafterNetwork, sequences: list[CachedSequence], shared: SharedWeights, *, bf16: bool
) -> ValidationReport:
    """Every anchor of every sequence is drafted once."""
    chains, reached, greedy_chains, greedy_reached, errors = [], [], [], [], []
    tokens = steps = 0
    for sequence in sequences:
        anchors = torch.arange(sequence.prompt_length, len(sequence.tokens) - 1)
        batch = pack([sequence], [anchors], network.config.block_size)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            out = run_blocks(network, batch, shared)
        overlap = agreement(out.logits, out.draft_ids, out.top_probs).overlap
        valid = batch.valid.flatten(0, 1)[: len(anchors)]
        chain = _per_slot(batch, overlap)[: len(anchors)].cumprod(-1)
        chains.append(chain)
        reached.append(_shifted(chain) * valid)
        if out.confidence_logit is not None:
            errors.append((out.confidence_logit.float().sigmoid() - overlap).abs())
        if sequence.temperature == 0:
            labels = batch.label_ids[batch.valid]
            hits = shared.draft_to_target[out.logits.argmax(-1)] == labels
            chain = _per_slot(batch, hits)[: len(anchors)].cumprod(-1)
            greedy_chains.append(chain)
            greedy_reached.append(_shifted(chain) * valid)
            walked = greedy_walk(chain.sum(-1))
            tokens, steps = tokens + walked[0], steps + walked[1]
    return ValidationReport(
        tau_sampling=1.0 + torch.cat(chains).sum(-1).mean().item(),
        tau_greedy=tokens / steps if steps else float("nan"),
        acceptance_sampling=_conditional(torch.cat(chains), torch.cat(reached)),
        acceptance_greedy=_conditional(torch.cat(greedy_chains), torch.cat(greedy_reached)) if steps else [],
        confidence_error=torch.cat(errors).mean().item() if errors else float("nan"),
    )


def _shifted(chain: Tensor) -> Tensor:
    """Chance of reaching slot k: the chain before it."""
    return torch.cat((torch.ones_like(chain[:, :1]), chain[:, :-1]), dim=1)
