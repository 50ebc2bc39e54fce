"""What every drafter offers the engine: context in, blocks out, outcomes back.

All methods are called by the step loop, on its thread, and may not block on anything but compute.
Drafts are one block per request; a request's KV blocks hold the drafter's context beside the target's.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dspark_ray.core.registry import Registry
from dspark_ray.core.types import FloatArray, SamplingParams
from dspark_ray.models.adjust import LogitsAdjuster
from dspark_ray.models.graphs import Capturer

if TYPE_CHECKING:
    from dspark_ray.models.drafters.chain import Draws


@dataclass(frozen=True, slots=True)
class ContextRows:
    """Rows whose tokens were committed in this step: the drafter's new context."""

    taps: Tensor  # [N, m·H] target hidden states at the tap layers
    positions: Tensor  # [N] int64
    slots: Tensor  # [N] int64 KV slots of the rows; −1: the row is not kept
    next_token_ids: Tensor  # [N] int64 the token after each row


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One request that wants a block: its last token is the anchor."""

    token_ids: Sequence[int]  # everything so far, anchor last
    blocks: Sequence[int]  # its KV blocks
    sampling: SamplingParams
    # [n] in [0, 1): the randomness of the drafted tokens. n ≤ γ tokens are wanted, for all requests alike.
    uniforms: NDArray[np.float64]
    # Shapes the logits of each slot, given the drafted tokens before it.
    adjuster: LogitsAdjuster | None = None
    # With shared noise, of the places to draft [n]: a token drawn with it is the target's own more often.
    noise_keys: NDArray[np.int64] | None = None
    number: int = 0  # of the request, in order of arrival
    # By drafter, the first position whose context that drafter has stored; absent: all from the start.
    context_from: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """Proposals for R requests, n tokens wanted of each. A drafter may propose fewer for some."""

    token_ids: list[list[int]]  # R lists of ≤ n target token ids
    confidences: FloatArray  # [R, n] calibrated chance to survive, given that all before did
    draft_probs: list[Tensor | None]  # R × [len, Vd] distribution each token was drawn from; None: one-hot
    confidence_logits: FloatArray | None = None  # [R, n] as the head gave them, for calibration
    notes: Sequence[object] | None = None  # R × what the drafter wants back with the draft's outcome


@dataclass(frozen=True, slots=True)
class Outcome:
    """What verification said about one request's draft."""

    num_verified: int
    num_accepted: int
    num_known: int = 0  # verified tokens that were judged: those after an accepted end of the text were not
    in_full: bool = False  # the step verified whole drafts, whatever their scores
    note: object = None  # the drafter's own, from its `DraftBlock`


class Drafter(Protocol):
    """Who proposes tokens. `vocab_map` [Vd] gives the target id of each draft id; None: the same."""

    num_draft_tokens: int  # γ
    taps: tuple[int, ...]  # target layers whose outputs it wants
    vocab_map: Tensor | None
    context_digests: tuple[str, ...]  # of the checkpoint whose context it stores; empty: it stores none

    def commit(self, rows: ContextRows) -> None:
        """Stores the context of committed rows. Called once a step, before `propose`."""

    def propose(self, requests: Sequence[DraftRequest]) -> DraftBlock:
        """One block per request."""

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Outcomes of this step's verification, for drafters that learn their confidences."""

    def wants_full_verification(self) -> bool:
        """Whether this step should verify whole drafts, to learn from. Called once a step, before lengths are
        chosen; decided from past steps alone."""

    def describe(self) -> str:
        """One line for the start-up log."""


@runtime_checkable
class CalibratedDrafter(Drafter, Protocol):
    """One whose confidences have temperatures."""

    def with_temperatures(self, path: Path) -> Drafter:
        """The same network and context with other temperatures. `ConfigError` if it has no head for them,
        `ArtefactError` for those of another drafter. Called beside the step loop."""


@runtime_checkable
class GraphedDrafter(Drafter, Protocol):
    """One whose pass can be captured."""

    def use_graphs(self, capturer: Capturer, max_requests: int) -> None:
        """Passes of up to so many requests run from captured ones, captured when they come."""

    def capture_all(self) -> None:
        """Captures them now, after `use_graphs`."""


@dataclass(frozen=True, slots=True)
class DeviceRequests:
    """R requests that want a block, of which the device knows more than the host."""

    anchors: Tensor  # [R] int64 their last tokens
    positions: Tensor  # [R] int64 of the anchors; the context is all before
    block_tables: Tensor  # [R, W] int32 KV blocks up to there at least
    context_from: Tensor  # [R] int64 the first position whose context this drafter has stored
    rules: Tensor  # [R] int64 of their acceptance: places in `tuple(AcceptanceRule)`
    num_tokens: int  # n, of each
    draws: "Draws | None"  # of the sampled ones; None: all are greedy
    keeps_probs: bool  # whether q is wanted


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """What was proposed, on the device."""

    token_ids: Tensor  # [R, n] int64 target ids
    confidences: Tensor  # [R, n] fp32, as `DraftBlock.confidences`
    draft_probs: Tensor | None  # [S, n, Vd] of the sampled requests, in their order


class DeviceDrafter(ABC):
    """One that can draft for requests whose last tokens the host has not read (engine/ahead.py). A class, not
    a protocol: what wraps a drafter changes what it proposes."""

    @property
    @abstractmethod
    def drafts_on_device(self) -> bool:
        """Whether this one can, as it is set up."""

    @abstractmethod
    def propose_on_device(self, requests: DeviceRequests) -> DeviceBlock:
        """As `propose`, without waiting for anything. `commit` has been given rows with slot −1 for those
        that do not count."""


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a drafter is built from."""

    target: object  # the Decoder; drafters share its embedding and LM head
    num_draft_tokens: int
    num_slots: int  # KV slots of the engine's pool
    kv_block_size: int
    max_positions: int
    path: str | None
    temperatures: str | None
    ngram_min: int
    ngram_max: int
    confidence: str = "head"  # or "online"


DRAFTERS: Registry[Callable[[DrafterContext], Drafter]] = Registry("drafter")
"""kind → factory."""
