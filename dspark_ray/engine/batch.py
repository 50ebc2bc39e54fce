"""The flat ragged batch of one target step: decoding rows first, prefill chunks after them, no padding."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from dspark_kernels.attention import PagedBatch
from torch import Tensor

from dspark_ray.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """One request's share of a step."""

    sequence: Sequence
    num_rows: int  # decoding: 1 + ℓ; prefilling: the chunk
    decoding: bool

    @property
    def draft_tokens(self) -> list[int]:
        """The ℓ draft tokens to verify."""
        draft = self.sequence.draft
        return draft.token_ids[: self.num_rows - 1] if self.decoding and draft else []

    @property
    def needs_logits(self) -> bool:
        """A chunk that stops short of the last token emits nothing."""
        return self.decoding or self.sequence.num_computed + self.num_rows == len(self.sequence.token_ids)


@dataclass(frozen=True, slots=True)
class VerifyBatch:
    """What the target forward takes."""

    work: tuple[Work, ...]
    token_ids: Tensor  # [N]
    positions: Tensor  # [N]
    slots: Tensor  # [N]
    paged: PagedBatch
    logit_rows: Tensor  # [M] rows whose logits are needed, in order of `work`
    context_tokens: int  # Σ cached keys attended to


def pack(work: Seq[Work], block_size: int) -> VerifyBatch:
    """Flattens the step's work; blocks for every row must be owned already."""
    ids: list[int] = []
    starts = np.zeros(len(work) + 1, dtype=np.int32)
    kv_len = np.zeros(len(work), dtype=np.int32)
    width = max(len(w.sequence.blocks) for w in work)
    tables = np.zeros((len(work), width), dtype=np.int32)
    positions, slots, logit_rows = [], [], []
    for index, item in enumerate(work):
        sequence, first = item.sequence, item.sequence.num_computed
        if item.decoding:
            ids += [sequence.token_ids[-1], *item.draft_tokens]
        else:
            ids += sequence.token_ids[first : first + item.num_rows]
        blocks = np.asarray(sequence.blocks, dtype=np.int32)
        tables[index, : len(blocks)] = blocks
        where = np.arange(first, first + item.num_rows)
        positions.append(where)
        slots.append(blocks[where // block_size].astype(np.int64) * block_size + where % block_size)
        kv_len[index] = first + item.num_rows
        starts[index + 1] = starts[index] + item.num_rows
        if item.decoding:
            logit_rows.append(np.arange(starts[index], starts[index + 1]))
        elif item.needs_logits:
            logit_rows.append(np.array([starts[index + 1] - 1]))
    no_rows = np.zeros(0, dtype=np.int64)
    return VerifyBatch(
        work=tuple(work),
        token_ids=torch.tensor(ids),
        positions=torch.from_numpy(np.concatenate(positions)),
        slots=torch.from_numpy(np.concatenate(slots)),
        paged=PagedBatch(
            query_start=torch.from_numpy(starts),
            kv_len=torch.from_numpy(kv_len),
            block_tables=torch.from_numpy(tables),
            block_size=block_size,
            max_query=max(w.num_rows for w in work),
            max_kv=int(kv_len.max()),
        ),
        logit_rows=torch.from_numpy(np.concatenate([no_rows, *logit_rows]).astype(np.int64)),
        context_tokens=int(kv_len.sum()),
    )
