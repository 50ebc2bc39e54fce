"""What travels over zmq between ingress, server and engine, and its msgpack form.

Every message is a list `[kind, fields...]`. A peer of another version or a stray packet must not stop a
loop: `decode` raises `MessageError` for anything that is not one of these.
"""

from dataclasses import astuple, dataclass, replace
from typing import Any

import msgpack

from dspark_ray.core.errors import DsparkError, QueueFullError, RequestError, StartDeadlineError
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

START_DEADLINE = "start_deadline"


class MessageError(DsparkError):
    """A packet that is none of our messages."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Server → engine: run this; its end goes to `server_address`, its tokens to `request.reply_address`."""

    request: Request
    server_address: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Server or ingress → engine: end this request. Unknown ids are no error: it may just have finished."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ApplyPlan:
    """Plan client → its engine loop."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class Stop:
    """Server → engine: leave the loop."""


@dataclass(frozen=True, slots=True)
class Emission:
    """A request's output and its place: how many of its tokens this attempt had sent before."""

    offset: int
    output: RequestOutput


@dataclass(frozen=True, slots=True)
class Tokens:
    """Engine → ingress, one per step: all outputs of that ingress' requests."""

    generation: int  # of the engine that sends: another one is a stale owner
    inbox_address: str  # where an abort can be sent
    emissions: tuple[Emission, ...]


@dataclass(frozen=True, slots=True)
class Ends:
    """Engine → server: requests that ended, without their tokens."""

    generation: int
    outputs: tuple[RequestOutput, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """Engine → server: a request that was not admitted. `queue_full` or the fields of a `RequestError`."""

    generation: int
    request_id: str
    message: str
    queue_full: bool = False
    param: str | None = None
    status: int = 400
    code: str | None = None

    @classmethod
    def of(cls, generation: int, request_id: str, error: RequestError | QueueFullError) -> "Rejected":
        if isinstance(error, RequestError):
            told = (error.message, False, error.param, error.status, error.code)
            return cls(generation, request_id, *told)
        late = START_DEADLINE if isinstance(error, StartDeadlineError) else None
        return cls(generation, request_id, str(error), queue_full=True, code=late)

    def error(self) -> RequestError | QueueFullError:
        """What it was made of."""
        if not self.queue_full:
            return RequestError(self.message, param=self.param, status=self.status, code=self.code)
        return (StartDeadlineError if self.code == START_DEADLINE else QueueFullError)(self.message)


Message = Submit | Abort | ApplyPlan | Stop | Tokens | Ends | Rejected


def encode(message: Message) -> bytes:
    """One packet."""
    return msgpack.packb([type(message).__name__, *_ENCODERS[type(message)](message)])


def decode(packet: bytes) -> Message:
    """The message in `packet`; raises `MessageError`."""
    try:
        kind, *fields = msgpack.unpackb(packet, use_list=False)
        return _DECODERS[kind](fields)
    except Exception as error:  # whatever a stray packet makes a parser do
        raise MessageError(f"not a message of this program: {error!r}") from error


def _pack_request(request: Request) -> list[Any]:
    return [
        request.request_id,
        request.prompt_token_ids,
        astuple(request.sampling),
        request.emitted_token_ids,
        request.reply_address,
        astuple(request.priority),
        request.session_key,
        request.grammar and astuple(request.grammar),
        request.speculation_details,
        request.adapter and astuple(request.adapter),
        request.client,
        request.start_within_ms,
        request.has_begun,
    ]


def _unpack_request(fields: Any) -> Request:
    request_id, prompt, sampling, emitted, address, priority, session_key, grammar, *others = fields
    details, adapter, client, start_within_ms, has_begun = others
    tier, level, target = priority
    return Request(
        request_id,
        prompt,
        SamplingParams(*sampling),
        emitted,
        address,
        Priority(ServiceTier(tier), level, target),
        session_key,
        grammar and CompiledGrammar(*grammar),
        details,
        adapter and AdapterRef(*adapter),
        client,
        start_within_ms,
        has_begun,
    )


def _pack_plan(plan: StepPlan) -> list[Any]:
    """By hand: a scheduler packs thousands a second, and `astuple` copies each deeply."""
    return [
        plan.replica_id,
        plan.generation,
        plan.sequence,
        plan.policy,
        plan.draft_tokens_per_s,
        plan.ttl_ms,
        plan.group_step_ms,
        [[one.tier, one.weight, one.target_tokens_per_s] for one in plan.tiers],
        plan.target_boost,
    ]


def _unpack_plan(fields: Any) -> StepPlan:
    *others, tiers, target_boost = fields
    terms = tuple(TierTerms(ServiceTier(tier), weight, target) for tier, weight, target in tiers)
    return replace(StepPlan(*others), tiers=terms, target_boost=target_boost)


def _pack_output(output: RequestOutput) -> list[Any]:
    usage = output.usage and astuple(output.usage)
    reason = output.finish_reason and str(output.finish_reason)
    return [
        output.request_id,
        output.token_ids,
        reason,
        usage,
        output.error,
        output.step_failed,
        [[one.logprob, one.top] for one in output.logprobs],
        [[one.logprob, one.top] for one in output.prompt_logprobs],
        output.details and astuple(output.details),
    ]


def _unpack_output(fields: Any) -> RequestOutput:
    request_id, token_ids, reason, usage, error, step_failed, logprobs, prompt_logprobs, details = fields
    return RequestOutput(
        request_id,
        token_ids,
        reason and FinishReason(reason),
        usage and RequestUsage(*usage),
        error,
        step_failed,
        tuple(TokenLogprobs(*one) for one in logprobs),
        tuple(TokenLogprobs(*one) for one in prompt_logprobs),
        details and StepDetails(*details),
    )


_ENCODERS: dict[type, Any] = {
    Submit: lambda m: [_pack_request(m.request), m.server_address],
    Abort: lambda m: [m.request_id],
    ApplyPlan: lambda m: [_pack_plan(m.plan)],
    Stop: lambda m: [],
    Tokens: lambda m: [
        m.generation,
        m.inbox_address,
        [[emission.offset, _pack_output(emission.output)] for emission in m.emissions],
    ],
    Ends: lambda m: [m.generation, [_pack_output(output) for output in m.outputs]],
    Rejected: lambda m: astuple(m),
}

_DECODERS: dict[str, Any] = {
    "Submit": lambda f: Submit(_unpack_request(f[0]), f[1]),
    "Abort": lambda f: Abort(*f),
    "ApplyPlan": lambda f: ApplyPlan(_unpack_plan(f[0])),
    "Stop": lambda f: Stop(*f),
    "Tokens": lambda f: Tokens(f[0], f[1], tuple(Emission(o, _unpack_output(out)) for o, out in f[2])),
    "Ends": lambda f: Ends(f[0], tuple(_unpack_output(output) for output in f[1])),
    "Rejected": lambda f: Rejected(*f),
}
