"""A packed batch through the drafter: from taps and anchors to logits beside the target's probabilities."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_ray.models.drafters.autoregressive import AutoregressiveNetwork
from dspark_ray.models.drafters.families import DrafterNetwork
from dspark_ray.models.drafters.network import DSparkNetwork
from dspark_ray.training.anchors import TrainingBatch, own_block, positions, visibility


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


def run_blocks(network: DrafterNetwork, batch: TrainingBatch, shared: SharedWeights) -> BlockOutputs:
    """Draft every block of the batch with teacher-forced previous tokens."""
    rows = batch.valid.flatten().nonzero().squeeze(-1)
    confidence = None
    if isinstance(network, DSparkNetwork):
        hidden = _parallel_slots(network, batch, shared)
        embeddings = network.markov_embedding(batch.previous_ids)
        features = _rows(network.markov_features(embeddings, hidden), rows)
        logits = network.logits(hidden.flatten(0, 2)[rows], shared.head_weight, features)
        if network.confidence_head is not None:
            confidence = network.confidence_logit(hidden.flatten(0, 2)[rows], _rows(embeddings, rows))
    else:
        outputs = _feedback_slots(network, batch, shared)
        logits = network.logits(outputs.flatten(0, 2)[rows], shared.head_weight)
    top_ids = batch.top_ids.flatten(0, 2)[rows]
    return BlockOutputs(
        logits, confidence, shared.target_to_draft[top_ids], batch.top_probs.flatten(0, 2)[rows]
    )


def _rows(values: Tensor | None, rows: Tensor) -> Tensor | None:
    """The rows [M, …] of values [N, A, γ, …]."""
    return None if values is None else values.flatten(0, 2)[rows]


def _parallel_slots(network: DSparkNetwork, batch: TrainingBatch, shared: SharedWeights) -> Tensor:
    """Normed hidden states of the slots that predict, all slots of a block at once. → [N, A, γ, H]"""
    config = network.config
    num_slots = config.num_slots(config.block_size)
    context_length = batch.taps.shape[1]
    context_positions = torch.arange(context_length).expand(batch.taps.shape[0], -1)
    context = network.context_kv(network.context(batch.taps.to(shared.embedding.dtype)), context_positions)
    context = [(keys[batch.group_sequence], values[batch.group_sequence]) for keys, values in context]

    block_ids = torch.full((*batch.anchors.shape, num_slots), config.mask_token_id)
    block_ids[..., 0] = batch.previous_ids[..., 0]
    embeddings = F.embedding(block_ids.flatten(1), shared.embedding)
    seen = visibility(config.context_start(batch.anchors), batch.anchors, context_length)
    own = own_block(batch.anchors.shape[1], num_slots).expand(len(batch.anchors), -1, -1)
    visible = torch.cat((seen.repeat_interleave(num_slots, dim=1), own), dim=-1)
    hidden = network(embeddings, positions(batch.anchors, num_slots), context, visible)
    return hidden.view(*block_ids.shape, -1)[:, :, num_slots - config.block_size :]


def _feedback_slots(network: AutoregressiveNetwork, batch: TrainingBatch, shared: SharedWeights) -> Tensor:
    """Outputs of γ rows one after the other: the training-time test of EAGLE-3. → [N, A, γ, H]

    The row of slot k holds the k-th token of the block, as it is in the text, and the output of the slot
    before; the first row the target's taps at the anchor's predecessor. Context rows end two before the
    anchor.
    """
    fused = network.fuse(batch.taps.to(shared.embedding.dtype))  # [B, S, H]
    num_sequences, context_length = batch.tokens.shape
    next_tokens = batch.tokens.roll(-1, dims=1)
    context_positions = torch.arange(context_length).expand(num_sequences, -1)
    keys, values = network.context_kv(F.embedding(next_tokens, shared.embedding), fused, context_positions)
    past = (keys[batch.group_sequence], values[batch.group_sequence])

    last_known = batch.anchors - 1  # [N, A]
    hidden = fused[batch.group_sequence[:, None], last_known]
    embeddings = F.embedding(batch.previous_ids, shared.embedding)  # [N, A, γ, H]
    own = own_block(batch.anchors.shape[1], 1).expand(len(batch.anchors), -1, -1)
    seen = visibility(network.config.context_start(batch.anchors), last_known, context_length)
    outputs = []
    for slot in range(network.config.block_size):
        seen = torch.cat((seen, own), dim=-1)
        hidden, past = network(embeddings[:, :, slot], hidden, last_known + slot, past, seen)
        outputs.append(hidden)
    return torch.stack(outputs, dim=2)
