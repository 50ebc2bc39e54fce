"""The flat ragged batch of one target step: decoding rows first, prefill chunks after them, no padding."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from dspark_kernels.attention import PagedBatch
from torch import Tensor

from dspark_ray.engine.sequence import Sequence
from dspark_ray.models.transfer import to_device


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
    context_tokens: int  # Σ cached keys that decoding requests attend to

    def to(self, device: torch.device) -> "VerifyBatch":
        """For a target on that device; the batch itself for one on the CPU, where it was packed."""
        if device.type == "cpu":
            return self
        return replace(
            self,
            token_ids=to_device(self.token_ids, device),
            positions=to_device(self.positions, device),
            slots=to_device(self.slots, device),
            paged=self.paged.to(device),
            logit_rows=to_device(self.logit_rows, device),
        )


def pack(work: Seq[Work], block_size: int) -> VerifyBatch:
    """Flattens the step's work; blocks for every row must be owned already."""
    ids: list[int] = []
    for item in work:
        sequence, first = item.sequence, item.sequence.num_computed
        if item.decoding:
            ids += [sequence.token_ids[-1], *item.draft_tokens]
        else:
            ids += sequence.token_ids[first : first + item.num_rows]
    rows = np.array([item.num_rows for item in work])
    starts = np.zeros(len(work) + 1, dtype=np.int32)
    np.cumsum(rows, out=starts[1:])
    first_positions = np.array([item.sequence.num_computed for item in work])
    kv_len = (first_positions + rows).astype(np.int32)
    tables = np.zeros((len(work), max(len(w.sequence.blocks) for w in work)), dtype=np.int32)
    for table, item in zip(tables, work, strict=True):
        table[: len(item.sequence.blocks)] = item.sequence.blocks
    owner = np.repeat(np.arange(len(work)), rows)  # [N] whose row it is
    positions = first_positions[owner] + np.arange(len(owner)) - starts[owner]
    slots = tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
    # All rows of a decoding request, the last one of a prompt that ends here.
    first_wanted = np.array([0 if w.decoding else w.num_rows - w.needs_logits for w in work], dtype=np.int64)
    wanted = np.arange(len(owner)) - starts[owner] >= first_wanted[owner]
    return VerifyBatch(
        work=tuple(work),
        token_ids=torch.tensor(ids),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        paged=PagedBatch(
            query_start=torch.from_numpy(starts),
            kv_len=torch.from_numpy(kv_len),
            block_tables=torch.from_numpy(tables),
            block_size=block_size,
            max_query=int(rows.max()),
            max_kv=int(kv_len.max()),
            row_request=torch.from_numpy(owner.astype(np.int32)),
        ),
        logit_rows=torch.from_numpy(np.flatnonzero(wanted)),
        context_tokens=int(sum(keys for w, keys in zip(work, kv_len, strict=True) if w.decoding)),
    )
