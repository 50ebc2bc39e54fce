"""Every message survives the wire; nothing else does."""

import msgpack
import pytest

from dspark_ray.core.types import (
    AdapterRef,
    CompiledGrammar,
    FinishReason,
    Priority,
    Request,
    RequestOutput,
    RequestUsage,
    SamplingParams,
    ServiceTier,
    StepDetails,
    StepPlan,
    TierTerms,
    TokenLogprobs,
)
from dspark_ray.runtime.messages import (
    Abort,
    ApplyPlan,
    Emission,
    Ends,
    Message,
    MessageError,
    Rejected,
    Stop,
    Submit,
    Tokens,
    decode,
    encode,
)

SAMPLING = SamplingParams(
    temperature=0.5,
    top_p=0.9,
    top_k=40,
    min_p=0.1,
    seed=(1 << 63) + 5,
    choice=3,
    max_tokens=7,
    stop_token_ids=(1, 2),
    ignore_eos=True,
    presence_penalty=0.5,
    logit_bias=((3, -1.5), (4, 2.0)),
    bad_words=((1, 2), (3,)),
    logprobs=2,
)
GRAMMAR = CompiledGrammar("digest", "{}")
REQUEST = Request("r", (1, 2, 3), SAMPLING, (4, 5), "tcp://127.0.0.1:1", grammar=GRAMMAR)
USAGE = RequestUsage(1, 2, 3, 4, 5, 6)
LOGPROBS = (TokenLogprobs(-0.5, ((7, -0.5), (9, -1.25))), TokenLogprobs(-3.0))
FINAL = RequestOutput("r", (7, 8), FinishReason.STOP, USAGE, logprobs=LOGPROBS, prompt_logprobs=LOGPROBS)
DETAILED = RequestOutput("r", (7, 8), details=StepDetails(7, 3, 1, (0.9, 0.5, 0.25)))

MESSAGES: list[Message] = [
    Submit(REQUEST, "tcp://127.0.0.1:2"),
    Submit(Request("q", (1,), SamplingParams()), ""),
    Submit(Request("q", (1,), SamplingParams(), (), "", Priority(ServiceTier.FLEX, -2, 30.0), "chat 7"), ""),
    Submit(Request("q", (1,), SamplingParams(), speculation_details=True), ""),
    Submit(Request("q", (1,), SamplingParams(), client="alice", start_within_ms=5.0, has_begun=True), ""),
    Submit(Request("q", (1,), SamplingParams(), adapter=AdapterRef("sql", "/lora/sql", "digest")), ""),
    Abort("r"),
    ApplyPlan(StepPlan("a", 3, 4, "shared_cap", 12.5, 100.0)),
    ApplyPlan(StepPlan("a", 3, 4, "local")),
    ApplyPlan(StepPlan("a", 3, 4, "lockstep", group_step_ms=12.5)),
    ApplyPlan(
        StepPlan("a", 3, 4, "weighted", tiers=(TierTerms(ServiceTier.FLEX, 0.5, 9.0),), target_boost=8.0)
    ),
    Stop(),
    Tokens(
        9,
        "tcp://127.0.0.1:3",
        (Emission(0, RequestOutput("r", (1,))), Emission(5, FINAL), Emission(7, DETAILED)),
    ),
    Ends(9, (FINAL, RequestOutput("q", (), FinishReason.ERROR, error="why", step_failed=True))),
    Rejected(9, "r", "too long", False, "max_tokens", 400, "context_length_exceeded"),
    Rejected(9, "r", "full", queue_full=True),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"GET / HTTP/1.1",
        msgpack.packb(5),
        msgpack.packb([]),
        msgpack.packb(["Unknown", 1]),
        msgpack.packb(["Submit"]),
        msgpack.packb(["Ends", 1, [["r", [], "nonsense", None, ""]]]),
        msgpack.packb([["Submit"], 1]),
    ],
)
def test_anything_else_is_refused(packet: bytes) -> None:
    with pytest.raises(MessageError):
        decode(packet)
