"""A packed batch through the drafter: from taps and anchors to logits beside the target's probabilities."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_ray.models.drafters.network import DSparkNetwork
from dspark_ray.training.anchors import TrainingBatch, positions, visibility


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """The target's frozen matrices, and the draft vocabulary."""

    embedding: Tensor  # [V, H]
    head_weight: Tensor  # [Vd, H] the LM head's rows of the draft vocabulary
    draft_to_target: Tensor  # [Vd] int64 target ids, increasing
    target_to_draft: Tensor  # [V] int64, −1 outside the draft vocabulary


def share_weights(
    embedding: Tensor, head_weight: Tensor, draft_to_target: Tensor, *, bf16: bool
) -> SharedWeights:
    """Gather the LM head's rows of the draft vocabulary and invert its numbering."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    target_to_draft = torch.full((head_weight.shape[0],), -1)
    target_to_draft[draft_to_target] = torch.arange(len(draft_to_target))
    head_rows = head_weight[draft_to_target].to(dtype)
    return SharedWeights(embedding.to(dtype), head_rows, draft_to_target, target_to_draft)


@dataclass(frozen=True, slots=True)
class BlockOutputs:
    """The M slots that have a label, in (group, block, slot) order."""

    logits: Tensor  # [M, Vd]
    confidence_logit: Tensor | None  # [M]
    draft_ids: Tensor  # [M, K] the target's top tokens in draft numbering, −1 outside
    top_probs: Tensor  # [M, K]


def run_blocks(network: DSparkNetwork, batch: TrainingBatch, shared: SharedWeights) -> BlockOutputs:
    """Draft every block of the batch with teacher-forced previous tokens."""
    config = network.config
    block_size = config.block_size
    context_length = batch.taps.shape[1]
    context_positions = torch.arange(context_length).expand(batch.taps.shape[0], -1)
    context = network.context_kv(network.context(batch.taps.to(shared.embedding.dtype)), context_positions)
    context = [(keys[batch.group_sequence], values[batch.group_sequence]) for keys, values in context]

    block_ids = batch.previous_ids.clone()
    block_ids[..., 1:] = config.mask_token_id
    embeddings = F.embedding(block_ids.flatten(1), shared.embedding)
    visible = visibility(batch.anchors, block_size, context_length)
    hidden = network(embeddings, positions(batch.anchors, block_size), context, visible)

    rows = batch.valid.flatten().nonzero().squeeze(-1)
    hidden = hidden.flatten(0, 1)[rows]
    markov = network.markov_embedding(batch.previous_ids.flatten()[rows])
    logits = network.logits(hidden, shared.head_weight, markov)
    confidence = network.confidence_logit(hidden, markov) if network.confidence_head else None
    top_ids = batch.top_ids.flatten(0, 2)[rows]
    return BlockOutputs(
        logits, confidence, shared.target_to_draft[top_ids], batch.top_probs.flatten(0, 2)[rows]
    )
