"""One request inside the engine. Mutable, owned by the step loop, never leaves its process."""

import hashlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dspark_ray.core.types import (
    FinishReason,
    FloatArray,
    Request,
    RequestUsage,
    TokenLogprobs,
)
from dspark_ray.models.adjust import LogitsAdjuster
from dspark_ray.models.noise import SharedNoise, shared_noise
from dspark_ray.scheduling.speculation import STALE_STEPS


@dataclass(slots=True)
class Draft:
    """The drafted tokens of one request, waiting for the next step's verification."""

    token_ids: list[int]  # ≤ γ
    survival: FloatArray  # [γ] calibrated, non-increasing, 0 past the end of the draft
    draft_probs: Tensor | None  # [len, Vd] the distribution each token was drawn from; None: one-hot
    confidence_logits: FloatArray | None = None  # [γ] as the head gave them
    note: object = None  # the drafter's own, handed back with the outcome


@dataclass(slots=True, eq=False)
class Sequence:
    """A request, its tokens, its blocks and its speculation state."""

    request: Request
    token_ids: list[int]  # prompt and output
    rng: np.random.Generator
    arrival: int  # order of arrival
    adjuster: LogitsAdjuster | None = None  # has seen the output so far
    noise: SharedNoise | None = None  # with the rule of shared noise
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the prompt's second token and on
    num_computed: int = 0  # leading tokens whose KV is in the cache
    blocks: list[int] = field(default_factory=list)
    num_registered: int = 0  # leading blocks known to the prefix cache
    prefix_identity: int = 0
    context_from: dict[str, int] = field(default_factory=dict)  # by drafter: where its context begins
    prefix_root: int = 0  # identity of its empty prefix: an adapter has one of its own
    draft: Draft | None = None
    survival_history: list[FloatArray] = field(default_factory=list)  # scores of past drafts, newest last
    zero_budget_steps: int = 0
    steps_since_draft: int = 0
    queued_ms: float = 0.0  # on the engine's clock
    queue_ms: float | None = None  # how long it waited for its first row
    tag: float = 0.0  # when its client's turn comes: scheduling/fair_share.py
    cost: float = 1.0  # of its client's share
    start_due_ms: float | None = None
    num_cached: int = 0
    num_drafted: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    finish_reason: FinishReason | None = None

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output(self) -> int:
        """Output tokens so far, those emitted before a resumption included."""
        return len(self.token_ids) - self.num_prompt

    @property
    def remaining_tokens(self) -> int:
        return self.request.sampling.max_tokens - self.num_output

    @property
    def is_decoding(self) -> bool:
        """Only the anchor (the last token) lacks KV, and it was emitted, not part of the prompt."""
        return self.num_computed == len(self.token_ids) - 1 and self.num_output > 0

    @property
    def turn(self) -> tuple[float, int]:
        """Its place in the queue, the lower first; preempted in reverse. A level is worth a bounded number of
        arrivals of each client, so that whoever waits is overtaken by so many at most.
        """
        return self.tag + LEVEL_ARRIVALS * self.request.priority.queue_level, self.arrival

    @property
    def num_prompt_logprobs_missing(self) -> int:
        """Prompt tokens whose log-probabilities are wanted and not known. A resumed request had them sent."""
        if self.request.sampling.prompt_logprobs is None or self.request.emitted_token_ids:
            return 0
        return self.num_prompt - 1 - len(self.prompt_logprobs)

    def noise_keys(self, count: int) -> NDArray[np.int64] | None:
        """Of the next `count` output tokens; None without shared noise."""
        return None if self.noise is None else self.noise.keys(self.num_output, count)

    def stale_survival(self, pending: int = 0) -> FloatArray | None:
        """Scores at least two steps old, or None: never the current block's. `pending`: later drafts whose
        scores are not known yet, the current block's among them."""
        age = STALE_STEPS + 1 - pending
        assert age > 0, "more drafts are pending than scores must be old"
        return self.survival_history[-age] if len(self.survival_history) >= age else None

    def remember(self, survival: FloatArray) -> None:
        """Notes a new draft's scores; keeps just enough to look `STALE_STEPS` back."""
        self.survival_history.append(survival)
        del self.survival_history[: -(STALE_STEPS + 1)]

    def usage(self) -> RequestUsage:
        return RequestUsage(
            prompt_tokens=self.num_prompt,
            cached_tokens=self.num_cached,
            completion_tokens=self.num_output,
            drafted_tokens=self.num_drafted,
            verified_tokens=self.num_verified,
            accepted_tokens=self.num_accepted,
            queue_ms=self.queue_ms,
        )


LEVEL_ARRIVALS = 64
"""How many later requests of each client a request goes ahead of per level of priority; a tier is a level."""


def new_sequence(request: Request, arrival: int, adjuster: LogitsAdjuster | None = None) -> Sequence:
    """A sequence at its beginning, or, for a resumed request, after the tokens already sent."""
    seed = request.sampling.seed
    if seed is not None:
        # The prompt too, so that requests of one seed are independent; and a resumed request must not
        # replay the noise of its first tokens.
        prompt = int.from_bytes(hashlib.sha256(repr(request.prompt_token_ids).encode()).digest()[:8])
        entropy = np.random.SeedSequence([seed % 2**63, prompt, len(request.emitted_token_ids)])
    else:
        entropy = np.random.SeedSequence()
    return Sequence(
        request=request,
        token_ids=[*request.prompt_token_ids, *request.emitted_token_ids],
        rng=np.random.Generator(np.random.Philox(entropy)),
        arrival=arrival,
        adjuster=adjuster,
        noise=shared_noise(request),
    )
