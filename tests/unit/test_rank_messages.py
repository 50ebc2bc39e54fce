"""What rank 0 tells the others, as bytes and back; journals of it; and who is blamed."""

import pytest
import torch
from dspark_kernels.attention import PagedBatch

from dspark_ray.core.errors import RankError
from dspark_ray.core.types import AdapterRef
from dspark_ray.models.parallel.channel import Progress, blame
from dspark_ray.models.parallel.journal import Journal
from dspark_ray.models.parallel.message import (
    AdapterMessage,
    ForwardMessage,
    HeadMessage,
    NewKVMessage,
    PackMessage,
    RankMessage,
    StopMessage,
    decode,
    encode,
)


def forward(
    rows: int = 3,
    requests: int = 2,
    logit_rows: torch.Tensor | None = None,
    adapters: torch.Tensor | None = None,
) -> ForwardMessage:
    generator = torch.Generator().manual_seed(rows)

    def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(0, 1 << 31, shape, generator=generator).to(dtype)

    batch = PagedBatch(
        query_start=numbers(requests + 1, dtype=torch.int32),
        kv_len=numbers(requests, dtype=torch.int32),
        block_tables=numbers(requests, 5, dtype=torch.int32),
        block_size=16,
        max_query=rows,
        max_kv=77,
    )
    return ForwardMessage(
        1 << 40, numbers(rows), numbers(rows), numbers(rows), batch, 77, logit_rows, adapters
    )


def check_equal(found: RankMessage, sent: RankMessage) -> None:
    assert type(found) is type(sent)
    assert found.number == sent.number
    assert found.shape() == sent.shape()
    if isinstance(sent, ForwardMessage):
        assert isinstance(found, ForwardMessage)
        for name in ("token_ids", "positions", "slots"):
            assert torch.equal(getattr(found, name), getattr(sent, name))
        for name in ("query_start", "kv_len", "block_tables"):
            assert torch.equal(getattr(found.batch, name), getattr(sent.batch, name))
        assert found.kv == sent.kv
        for name in ("block_size", "max_query", "max_kv"):
            assert getattr(found.batch, name) == getattr(sent.batch, name)
        for name in ("logit_rows", "adapters"):
            one, other = getattr(found, name), getattr(sent, name)
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)
    if isinstance(sent, HeadMessage):
        assert isinstance(found, HeadMessage)
        assert torch.equal(found.hidden, sent.hidden)
        assert found.hidden.dtype == sent.hidden.dtype
    if isinstance(sent, AdapterMessage | PackMessage | NewKVMessage):
        assert found == sent


MESSAGES: dict[str, RankMessage] = {
    "a step": forward(rows=5, logit_rows=torch.tensor([0, 4])),
    "a step of prompts that emits nothing": forward(logit_rows=torch.tensor([], dtype=torch.int64)),
    "a step whose logits are not asked for": forward(rows=1, requests=1),
    "a step with adapters": forward(adapters=torch.tensor([-1, 0, 1])),
    "a step with adapters and logits": forward(
        logit_rows=torch.tensor([2]), adapters=torch.tensor([0, 0, -1])
    ),
    "an adapter": AdapterMessage(5, AdapterRef("größe", "/home/x y/é", "0" * 64), 64),
    "a pack": PackMessage(6, ("ab", "cd"), ("cd", "ef", "ab")),
    "a pack of none": PackMessage(7, (), ()),
    "bf16 states": HeadMessage(3, torch.randn(3, 7).to(torch.bfloat16)),
    "fp32 states": HeadMessage(4, torch.randn(64, 32)),
    "storage": NewKVMessage(1, 123456789012),
    "storage beside others": NewKVMessage(9, 16, (1, 5)),
    "the end": StopMessage(9),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_arrive_as_they_were_sent(name: str) -> None:
    check_equal(decode(bytearray(encode(MESSAGES[name]))), MESSAGES[name])


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_that_is_cut_off_is_none(name: str) -> None:
    payload = encode(MESSAGES[name])
    for length in (0, 1, 15, len(payload) // 2, len(payload) - 8):
        if length < len(payload) - 8 or name != "the end":
            with pytest.raises(RankError, match="none that ranks send"):
                decode(bytearray(payload[:length]))


@pytest.mark.parametrize("payload", [b"\xff" * 64, b"\x09" + bytes(15), b"\x00\x03" + b"\xff" * 100])
def test_bytes_that_are_no_message(payload: bytes) -> None:
    with pytest.raises(RankError, match="none that ranks send"):
        decode(bytearray(payload))


def test_journals_keep_the_last_messages_and_tell_them_apart() -> None:
    journal, other = Journal(kept=3), Journal(kept=3)
    for number in range(5):
        message = NewKVMessage(number, 16)
        journal.note(message, encode(message))
        other.note(message, encode(message) if number != 4 else encode(NewKVMessage(4, 17)))
    assert [entry.number for entry in journal.entries()] == [2, 3, 4]
    assert journal.entries()[:2] == other.entries()[:2]
    assert journal.entries()[2] != other.entries()[2]
    assert "4 new_kv" in journal.tail()


def progress(taken: int = 9, sums: int = 40, silent_s: float | None = 0.1, ended: bool = False) -> Progress:
    return Progress(taken, taken - 1, sums, silent_s, ended)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({1: progress(), 2: progress(ended=True, sums=50)}, "rank 2 has ended in message 9"),
        ({1: progress(silent_s=9.0), 2: progress(sums=30)}, "rank 1 gave no sign of life for 9.0 s"),
        ({1: progress(), 2: progress(sums=39)}, "rank 2 is behind in message 9: it has taken 9"),
        ({1: progress(taken=8), 2: progress(sums=3)}, "rank 1 is behind in message 9: it has taken 8"),
        ({1: progress(), 2: progress(silent_s=None)}, "no rank is behind"),
    ],
)
def test_whoever_holds_the_others_up_is_named(found: dict[int, Progress], words: str) -> None:
    assert words in blame(found, number=9, sums=40)
