"""The target's forward pass once more, dense and plain: what paged, packed and ragged must agree with."""

import numpy as np
import torch
from dspark_kernels.attention import PagedBatch

from dspark_ray.models.targets.decoder import Decoder


def dense_logits(target: Decoder, tokens: tuple[int, ...]) -> np.ndarray:
    """Logits after every token of one sequence, computed in one prefill over fresh KV. → [N, V] float32"""
    count = len(tokens)
    positions = torch.arange(count)
    batch = PagedBatch(
        query_start=torch.tensor([0, count], dtype=torch.int32),
        kv_len=torch.tensor([count], dtype=torch.int32),
        block_tables=torch.zeros((1, 1), dtype=torch.int32),
        block_size=count,
        max_query=count,
        max_kv=count,
    )
    with torch.inference_mode():
        output = target.forward(torch.tensor(tokens), positions, target.new_kv(count), positions, batch)
        return target.logits(output.hidden).float().numpy()
