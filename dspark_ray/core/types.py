"""The types that flow between processes and floors, one per hop. Frozen; units in the names.

Arrays are numpy here: floors 0-1 and the simulator run without torch. Types that hold torch tensors
(`DraftBlock`, `VerifyBatch`) live beside the code that makes them.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_ray.core.request_times import RequestTimes

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]


class FinishReason(StrEnum):
    """Why a request ended, in OpenAI's words plus `abort` (client gone) and `error`."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"  # stopped after tool calls; the serving floor's word for STOP
    ABORT = "abort"
    ERROR = "error"


class VerificationMode(StrEnum):
    """How many drafted tokens are verified: none, a fixed number, by threshold, or by throughput."""

    OFF = "off"
    FIXED = "fixed"
    THRESHOLD = "threshold"
    ALGORITHM1 = "algorithm1"
    ADAPTIVE = "adaptive"


class ServiceTier(StrEnum):
    """How much a request counts when there is not enough for all; from least to most."""

    FLEX = "flex"
    DEFAULT = "default"
    PRIORITY = "priority"


SERVICE_TIERS = tuple(ServiceTier)
"""Their order is their number in arrays."""


class AcceptanceRule(StrEnum):
    """What decides whether a draft token stands (docs/method.md); a confidence belongs to one of them."""

    GREEDY = "greedy"
    REJECTION = "rejection"
    SHARED_NOISE = "shared_noise"


MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when the request ends (stop strings are the detokeniser's job).

    Token rules (docs/api.md) shape the logits of target and drafter before temperature and filters.
    """

    temperature: float = 1.0  # below MIN_TEMPERATURE: greedy
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    seed: int | None = None
    choice: int = 0  # its number among the choices of a prompt: each has noise of its own
    # Whether a seeded request draws by shared noise. If not, the rejection rule draws from a seeded
    # generator, and the text repeats only while drafts and load do: for measuring that rule.
    shared_noise: bool = True
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0  # no end-of-sequence or stop token before so many tokens of output
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the output must not contain
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    max_draft_tokens: int | None = None  # verified in a step, at most; 0: the request is never drafted
    logprobs: int | None = None  # how many alternatives are reported with each output token's; None: nothing
    prompt_logprobs: int | None = None  # likewise for the prompt, whose cached prefix is then computed anew
    deterministic: bool = False  # refused where the text could depend on the batch around it

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken: also where dividing by the temperature would overflow, and
        for top_k 1, so that it breaks ties as temperature 0 does."""
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1

    @property
    def rule(self) -> AcceptanceRule:
        """How its draft tokens are accepted."""
        if self.greedy:
            return AcceptanceRule.GREEDY
        shares = self.seed is not None and self.shared_noise
        return AcceptanceRule.SHARED_NOISE if shares else AcceptanceRule.REJECTION


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How a choice's tokens become text: the detokeniser's half of the sampling parameters."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False  # the text includes the stop string or stop token that ended it
    skip_special_tokens: bool = True
    min_tokens: int = 0  # a stop string that is complete within so many tokens does not count


@dataclass(frozen=True, slots=True)
class Priority:
    """What a request claims when there is not enough for all. It never changes how a text is drawn."""

    tier: ServiceTier = ServiceTier.DEFAULT
    level: int = 0  # place in the queue: the lower goes first
    target_tokens_per_s: float | None = None  # wanted speed; None: its tier's

    @property
    def queue_level(self) -> int:
        """The lower goes first; a tier is worth one level."""
        return self.level + 1 - SERVICE_TIERS.index(self.tier)


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """What a request's text must follow, compiled for the model's vocabulary: engines only load it."""

    digest: str  # of description and vocabulary
    compiled: str  # xgrammar's serialised form
    tag: str = ""  # the description, a structural tag: for an engine that compiles it itself


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """A LoRA adapter: what clients call it, where it lies, and what is in it. Requests carry it whole, so
    that a replica that has never heard of it can load it.
    """

    name: str
    path: str
    digest: str  # of its files: adapters of one name, one after the other, share no cached prefix


@dataclass(frozen=True, slots=True)
class Request:
    """One choice to generate, as the ingress hands it to a replica."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    emitted_token_ids: tuple[int, ...] = ()  # set when the request is resumed after a replica's death
    reply_address: str = ""  # zmq address of the ingress; empty: outputs stay in the process
    priority: Priority = Priority()
    session_key: str = ""  # requests with one key share a beginning: they are best served together
    grammar: CompiledGrammar | None = None
    speculation_details: bool = False  # outputs say how their tokens came about
    adapter: AdapterRef | None = None  # of the target; None: the model itself
    client: str = ""  # whose share of the queue it takes: the name of its API key
    start_within_ms: float | None = None  # longest wait in a queue; then it is refused
    has_begun: bool = False  # part of an answer of which something was sent: never refused for want of room


@dataclass(frozen=True, slots=True)
class RequestUsage:
    """What one request cost. drafted = verified + trimmed; verified = accepted + rejected."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens served from the prefix cache
    completion_tokens: int = 0
    drafted_tokens: int = 0
    verified_tokens: int = 0
    accepted_tokens: int = 0
    queue_ms: float | None = None  # until its first row was computed; None where that is not known


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token on its own."""

    text: str  # with U+FFFD where it is only part of a character
    data: bytes  # what it really stands for


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token under the target's own distribution at its place: before temperature, rules and filters."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability) of the likeliest, descending


@dataclass(frozen=True, slots=True)
class StepDetails:
    """How one request's tokens of one step came about: the accepted ones, then the target's own."""

    drafted: int
    verified: int
    accepted: int
    survival: tuple[float, ...] = ()  # [verified] calibrated, as it ranked them


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The tokens one step emitted for one request; `finish_reason` and `usage` are set on the last."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: RequestUsage | None = None
    error: str = ""  # set with FinishReason.ERROR
    step_failed: bool = False  # with ERROR: a step that held this request raised, it may be the cause
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token, if asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # with the first token: of the prompt's second to last
    details: StepDetails | None = None  # only where the request asks


@dataclass(slots=True)
class SpeculationCounters:
    """Running totals with the identities of docs/architecture.md ("Names"). The only mutable type here."""

    block_size: int  # γ
    drafts: int = 0  # blocks drafted
    drafted_tokens: int = 0
    verified_tokens: int = 0
    trimmed_tokens: int = 0
    accepted_tokens: int = 0
    rejected_tokens: int = 0
    emitted_tokens: int = 0  # all output tokens, the first one (from prefill) included
    decode_tokens: int = 0  # emitted by decoding steps: the numerator of τ
    request_steps: int = 0  # request × target step pairs: the denominator of τ, steps with ℓ = 0 included
    target_steps: int = 0  # target forward passes
    expected_tokens: float = 0.0  # what `accepted_tokens` would be if every score were true
    verified_per_position: list[int] = field(default_factory=list)  # [γ]
    accepted_per_position: list[int] = field(default_factory=list)  # [γ]

    def __post_init__(self) -> None:
        self.verified_per_position = self.verified_per_position or [0] * self.block_size
        self.accepted_per_position = self.accepted_per_position or [0] * self.block_size

    @property
    def tau(self) -> float:
        """Emitted decode tokens per request and target step; 0 before the first one."""
        return self.decode_tokens / self.request_steps if self.request_steps else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of the verified tokens at each position that were accepted, unconditional. [γ]"""
        pairs = zip(self.accepted_per_position, self.verified_per_position, strict=True)
        return [accepted / verified if verified else 0.0 for accepted, verified in pairs]


@dataclass(frozen=True, slots=True)
class ContextBand:
    """How speculation does for requests of some lengths."""

    first_token: int  # lengths from here to the next band's
    tau: float  # tokens a request and step, since the start
    cap: int  # draft tokens verified at most


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of one engine, for metrics, health and the router."""

    engine_id: str
    counters: SpeculationCounters
    num_running: int
    num_waiting: int
    kv_used_blocks: int
    kv_total_blocks: int
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_refused: int = 0  # for want of room or time, at the door or out of the queue
    budget_tokens: float = 0.0  # draft budget, mean over the last second's steps
    step_predicted_ms: float = 0.0  # likewise
    step_measured_ms: float = 0.0
    plan_age_ms: float | None = None  # None: no live plan, the replica plans alone
    ready: bool = False  # the canary generation has passed
    kind: str = "native"  # "timed": its times are simulated
    max_running: int = 0
    kv_block_size: int = 0  # tokens
    rates: tuple[tuple[int, float], ...] = ()  # throughput by requests: scheduling/load.py
    prefill_ms_per_token: float = 0.0
    context_bands: tuple[ContextBand, ...] = ()  # mode adaptive
    times: RequestTimes = field(default_factory=RequestTimes)


@dataclass(frozen=True, slots=True)
class SwapOrder:
    """A drafter to be tried while serving, or new temperatures of the present one (`path` None)."""

    path: str | None
    temperatures: str | None = None  # None: those beside the checkpoint
    kind: str | None = None  # None: the present one's
    share: float = 0.1  # of the requests, during the trial
    automatic: bool = True  # it is promoted or rolled back by its figures; if not, by hand
    id: str = ""


@dataclass(frozen=True, slots=True)
class ArmStats:
    """One drafter of a trial."""

    description: str
    num_drafts: int  # judged
    tau: float  # tokens a step of a drafted request, the bonus token included
    step_ms: float  # of a step with this drafter alone; 1 where no step costs are known
    tokens_per_ms: float  # of one request: what it is worth
    error: float | None  # standard error of it; None before two drafts were judged


@dataclass(frozen=True, slots=True)
class SwapState:
    """How a trial goes, or how the last one went."""

    status: str  # none, trial, promoted, rolled_back
    order: SwapOrder | None = None
    reason: str = ""
    arms: tuple[ArmStats, ...] = ()  # the drafter before, the candidate


@dataclass(frozen=True, slots=True)
class RowClaims:
    """What the requests behind the rows of `SurvivalReport.survival` claim."""

    tiers: IntArray  # [R] places in SERVICE_TIERS
    targets_per_s: FloatArray  # [R] tokens per second asked for; 0: none, their tier's counts


@dataclass(frozen=True, slots=True)
class SurvivalReport:
    """What a replica tells the scheduler actor, a few times a second: full state, the last one wins."""

    replica_id: str
    generation: int  # of this replica's engine; a lower one is a dead predecessor's
    sequence: int  # grows by one a report; an older one is dropped
    survival: FloatArray  # [R, γ] non-increasing along γ, at least two steps old
    base_rows: int  # anchors of a step: its rows that decode without a draft token
    num_running: int
    num_waiting: int
    table_digest: str
    table: dict[str, Any] | None  # the step table; None once the actor has acknowledged its digest
    budget_tokens: float  # mean of the recent steps
    claims: RowClaims | None = None  # None: all rows are of the default tier
    plan_address: str = ""  # zmq address where plans may be sent unasked; empty: nowhere


@dataclass(frozen=True, slots=True)
class TierTerms:
    """What a token of one service tier counts, and the speed that its requests are owed."""

    tier: ServiceTier
    weight: float = 1.0
    target_tokens_per_s: float | None = None  # of each request that names none itself


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What couples one replica to the others. It never carries a budget: that is recomputed each step."""

    replica_id: str
    generation: int
    sequence: int
    policy: str
    draft_tokens_per_s: float | None = None  # this replica's share of the shared cap; None: no cap
    ttl_ms: float = 2000.0  # counted from arrival: clocks of two machines are not compared
    group_step_ms: float | None = None  # all members' steps end together after this time; None: no group
    tiers: tuple[TierTerms, ...] = ()  # empty: every token counts the same
    target_boost: float = 0.0  # how much more a token counts while its request is below its target


@dataclass(frozen=True, slots=True)
class FleetView:
    """The scheduler actor's whole knowledge at one planning round."""

    reports: tuple[SurvivalReport, ...]  # ordered by replica_id; live ones only
    tables: dict[str, Any]  # table_digest → StepTable
    cap_draft_tokens_per_s: float | None = None
    tiers: tuple[TierTerms, ...] = ()
    target_boost: float = 0.0
