"""The target's opinion of a given text in one plain forward pass: what generation is checked against."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from dspark_ray.core.types import Request, SamplingParams
from dspark_ray.engine.batch import Work, pack
from dspark_ray.engine.sequence import new_sequence
from dspark_ray.models.targets.decoder import Decoder

_BLOCK_SIZE = 16


@torch.inference_mode()
def teacher_forced_logits(target: Decoder, token_ids: Seq[int], first: int) -> Tensor:
    """Logits after token `first` and each later one, in fp32. token_ids [N] → [N − first, V]"""
    num_blocks = -(-len(token_ids) // _BLOCK_SIZE)
    sequence = new_sequence(Request("score", tuple(token_ids), SamplingParams(temperature=0.0)), 0)
    sequence.blocks = list(range(num_blocks))
    batch = pack([Work(sequence, len(token_ids), decoding=False)], _BLOCK_SIZE).to(target.device)
    output = target.forward(
        batch.token_ids, batch.positions, target.new_kv(num_blocks * _BLOCK_SIZE), batch.slots, batch.paged
    )
    return target.logits(output.hidden[first:]).float()
