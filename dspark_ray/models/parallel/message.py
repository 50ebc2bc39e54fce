"""What rank 0 tells the others: everything a pass needs, so that nobody else decides anything.

One `ForwardMessage` a step carries tokens, lengths and places together. The bytes are the same for every
rank, whichever way they travel.
"""

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from dspark_kernels.attention import PagedBatch
from torch import Tensor

from dspark_ray.core.errors import RankError
from dspark_ray.core.types import AdapterRef

_HEADER = struct.Struct("<BBxxxxxxq")  # kind, number of fields, number of the message
_FIELD = struct.Struct("<BBxxxxxx2q")  # type, dimensions, sizes
_ALIGNMENT = 8  # of a field's bytes
_DTYPES = (torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.uint8)


@dataclass(frozen=True, slots=True)
class ForwardMessage:
    """One pass over a flat ragged batch, and the logits of some of its rows."""

    kind: ClassVar[str] = "forward"
    number: int
    token_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64
    slots: Tensor  # [N] int64
    batch: PagedBatch
    kv: int  # number of the message that made the storage
    logit_rows: Tensor | None  # [M] int64
    adapters: Tensor | None = None  # [N] int64, each row's place in the pack; None: no row has an adapter

    def shape(self) -> tuple[int, ...]:
        """(N, R, blocks a request, M), for journals."""
        rows = 0 if self.logit_rows is None else len(self.logit_rows)
        return (len(self.token_ids), *self.batch.block_tables.shape, rows)


@dataclass(frozen=True, slots=True)
class HeadMessage:
    """Logits of hidden states that an earlier pass left on rank 0: log-probabilities of prompts."""

    kind: ClassVar[str] = "head"
    number: int
    hidden: Tensor  # [M, H]

    def shape(self) -> tuple[int, ...]:
        return tuple(self.hidden.shape)


@dataclass(frozen=True, slots=True)
class NewKVMessage:
    """Fresh KV storage, known by this message's number from here on."""

    kind: ClassVar[str] = "new_kv"
    number: int
    num_slots: int
    kept: tuple[int, ...] = ()  # numbers of those before it that are still in use

    def shape(self) -> tuple[int, ...]:
        return (self.num_slots, *self.kept)


@dataclass(frozen=True, slots=True)
class AdapterMessage:
    """Everyone reads its part of a LoRA adapter; all say how that went."""

    kind: ClassVar[str] = "adapter"
    number: int
    ref: AdapterRef
    max_rank: int

    def shape(self) -> tuple[int, ...]:
        return (self.max_rank,)


@dataclass(frozen=True, slots=True)
class PackMessage:
    """The adapters of the passes that follow, in this order, and all that are still wanted."""

    kind: ClassVar[str] = "pack"
    number: int
    digests: tuple[str, ...]
    held: tuple[str, ...]

    def shape(self) -> tuple[int, ...]:
        return (len(self.digests), len(self.held))


@dataclass(frozen=True, slots=True)
class StopMessage:
    """There are no further messages."""

    kind: ClassVar[str] = "stop"
    number: int

    def shape(self) -> tuple[int, ...]:
        return ()


RankMessage = ForwardMessage | HeadMessage | NewKVMessage | AdapterMessage | PackMessage | StopMessage
_KINDS: tuple[type[RankMessage], ...] = (
    ForwardMessage,
    HeadMessage,
    NewKVMessage,
    AdapterMessage,
    PackMessage,
    StopMessage,
)


def encode(message: RankMessage) -> bytes:
    """As bytes; `decode` is the inverse."""
    fields = _fields(message)
    parts = [_HEADER.pack(_KINDS.index(type(message)), len(fields), message.number)]
    for field in fields:
        assert field.dim() <= 2, "vectors and matrices only"
        sizes = (*field.shape, 0, 0)[:2]
        parts.append(_FIELD.pack(_DTYPES.index(field.dtype), field.dim(), *sizes))
        # numpy has no bfloat16: its bits travel.
        bits = field.view(torch.int16) if field.dtype == torch.bfloat16 else field
        content = bits.cpu().contiguous().numpy().tobytes()
        parts.append(content + bytes(-len(content) % _ALIGNMENT))
    return b"".join(parts)


def decode(payload: bytearray) -> RankMessage:
    """The tensors look at `payload`. `RankError` for bytes that are no message."""
    try:
        kind, count, number = _HEADER.unpack_from(payload)
        fields, at = [], _HEADER.size
        for _ in range(count):
            code, dims, *sizes = _FIELD.unpack_from(payload, at)
            shape, dtype = sizes[:dims], _DTYPES[code]
            at += _FIELD.size
            num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            if at + num_bytes > len(payload):
                raise ValueError("it ends early")
            fields.append(
                torch.frombuffer(payload, dtype=dtype, count=num_bytes // dtype.itemsize, offset=at).view(
                    shape
                )
                if num_bytes
                else torch.empty(shape, dtype=dtype)
            )
            at += num_bytes + -num_bytes % _ALIGNMENT
        return _message(_KINDS[kind], number, fields)
    except (struct.error, IndexError, ValueError, RuntimeError) as error:
        raise RankError(f"a message of {len(payload)} bytes is none that ranks send: {error}") from error


def digest(payload: bytes | bytearray) -> str:
    """16 hex digits, for comparing what ranks were told."""
    return hashlib.blake2b(payload, digest_size=8).hexdigest()


def _fields(message: RankMessage) -> list[Tensor]:
    if isinstance(message, ForwardMessage):
        batch = message.batch
        optional = [field for field in (message.logit_rows, message.adapters) if field is not None]
        given = [message.logit_rows is not None, message.adapters is not None]
        sizes = torch.tensor([batch.block_size, batch.max_query, batch.max_kv, message.kv, *given])
        return [
            message.token_ids,
            message.positions,
            message.slots,
            batch.query_start,
            batch.kv_len,
            batch.block_tables,
            sizes,
            *optional,
        ]
    if isinstance(message, HeadMessage):
        return [message.hidden]
    if isinstance(message, NewKVMessage):
        return [torch.tensor([message.num_slots, *message.kept])]
    if isinstance(message, AdapterMessage):
        ref = message.ref
        return [_text([ref.name, ref.path, ref.digest, str(message.max_rank)])]
    return [_text(message.digests), _text(message.held)] if isinstance(message, PackMessage) else []


def _text(words: Sequence[str]) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(list(words)).encode()), dtype=torch.uint8)


def _words(text: Tensor) -> tuple[str, ...]:
    return tuple(json.loads(text.numpy().tobytes()))


def _message(kind: type[RankMessage], number: int, fields: list[Tensor]) -> RankMessage:
    if kind is ForwardMessage:
        token_ids, positions, slots, query_start, kv_len, tables, sizes, *optional = fields
        block_size, max_query, max_kv, kv, has_rows, has_adapters = sizes.tolist()
        batch = PagedBatch(query_start, kv_len, tables, block_size, max_query, max_kv)
        logit_rows = optional.pop(0) if has_rows else None
        adapters = optional.pop(0) if has_adapters else None
        return ForwardMessage(number, token_ids, positions, slots, batch, kv, logit_rows, adapters)
    if kind is HeadMessage:
        return HeadMessage(number, *fields)
    if kind is NewKVMessage:
        num_slots, *kept = fields[0].tolist()
        return NewKVMessage(number, num_slots, tuple(kept))
    if kind is AdapterMessage:
        name, path, digest, max_rank = _words(fields[0])
        return AdapterMessage(number, AdapterRef(name, path, digest), int(max_rank))
    return PackMessage(number, *map(_words, fields)) if kind is PackMessage else StopMessage(number)
