"""One decoding step that the device carries out by itself: it chooses the lengths under the budget it is
given, verifies, judges, and drafts the next blocks. Nothing of it is read before it has been launched, so the
next one can be launched behind it.

What the host knows of a step (`Decision`) goes there in one copy; what the step found (`Launched.found`)
comes back in one. In between a batch has as many rows as the budget allows: those that no request takes are
pad rows, as in captured passes (models/graphs.py).
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from dspark_kernels.attention import PagedBatch
from dspark_kernels.sampling import survival_lengths
from numpy.typing import NDArray
from torch import Tensor

from dspark_ray.core.types import AcceptanceRule, FloatArray, IntArray, SamplingParams
from dspark_ray.engine.device_acceptance import RULES, JudgedRows
from dspark_ray.engine.sequence import Sequence
from dspark_ray.models.drafters.base import DeviceRequests
from dspark_ray.models.drafters.chain import Draws, keys_of
from dspark_ray.models.graphs import FlatRows
from dspark_ray.models.noise import keys_at
from dspark_ray.models.sampling import SamplingRows, sampling_rows
from dspark_ray.models.transfer import HostCopy, arrays_to_device

RULE_ORDER = tuple(AcceptanceRule)
_NEUTRAL = SamplingParams()  # stands in for greedy requests where others of the batch are filtered


class Roster:
    """The requests of a batch, and on the device what of them never changes. R requests."""

    def __init__(
        self, sequences: Seq[Sequence], digest: str | None, vocab: tuple[int, int], device: torch.device
    ):
        """digest: of the drafter whose context counts; vocab: sizes of the target's vocabulary and of the
        drafter's."""
        self.sequences = tuple(sequences)
        params = [s.request.sampling for s in sequences]
        rules = [p.rule for p in params]
        self.rules_used = tuple(rule for rule in RULE_ORDER if rule in rules)
        self.is_drawn = np.array([rule is AcceptanceRule.REJECTION for rule in rules])  # [R]
        self.is_sampled = np.array([rule is not AcceptanceRule.GREEDY for rule in rules])  # [R]
        places = np.array([RULE_ORDER.index(rule) for rule in rules])
        # Of each, one after the position of its last token; and the position of its first one.
        ends = np.array([s.num_prompt + p.max_tokens for s, p in zip(sequences, params, strict=True)])
        prompts = np.array([s.num_prompt for s in sequences])
        bases = np.array([0 if s.noise is None else s.noise.base for s in sequences], dtype=np.int64)
        known = np.array([s.context_from.get(digest or "", 0) for s in sequences])
        self.rules, self.ends, self.prompts, self.noise_bases, self.context_from = arrays_to_device(
            device, places, ends, prompts, bases, known
        )
        self.target_filters = self.draft_filters = None
        if self.is_sampled.any():
            neutral = [_NEUTRAL if p.greedy else p for p in params]
            self.target_filters = sampling_rows(neutral, vocab[0], device)  # [R]
            self.draft_filters = sampling_rows(neutral, vocab[1], device)

    def __len__(self) -> int:
        return len(self.sequences)


@dataclass(frozen=True, slots=True)
class Standing:
    """Where R requests stand between two steps, on the device."""

    anchors: Tensor  # [R] int64 last tokens
    positions: Tensor  # [R] int64 of the anchors: the tokens before have their KV
    drafted: Tensor  # [R, n] int64 target ids, anything where nothing was drafted
    confidences: Tensor  # [R, n] fp32
    draft_probs: Tensor | None  # [P, n, Vd] q of drafted tokens; None: all are one-hot
    probs_at: Tensor | None  # [R] int64 whose of those is a request's; anything for those without

    @property
    def width(self) -> int:
        """n"""
        return self.drafted.shape[1]

    def select(self, rows: Tensor) -> "Standing":
        """Some of them [R'] int64, in that order."""
        return Standing(
            self.anchors[rows],
            self.positions[rows],
            self.drafted[rows],
            self.confidences[rows],
            self.draft_probs,
            None if self.probs_at is None else self.probs_at[rows],
        )


def standing_of(sequences: Seq[Sequence], device: torch.device) -> Standing:
    """As the host knows it: after a step that it has read."""
    drafts = [s.draft for s in sequences]
    width = max((len(d.token_ids) for d in drafts if d is not None), default=0)
    drafted = np.zeros((len(sequences), width), dtype=np.int64)
    confidences = np.zeros((len(sequences), width), dtype=np.float32)
    probs_at = np.zeros(len(sequences), dtype=np.int64)
    probs: list[Tensor] = []
    for row, draft in enumerate(drafts):
        if draft is None:
            continue
        assert len(draft.token_ids) == width, "drafts of one step are of one width"
        drafted[row] = draft.token_ids
        confidences[row] = _confidences_of(draft.survival[:width])
        if draft.draft_probs is not None:
            probs_at[row] = len(probs)
            probs.append(draft.draft_probs)
    anchors = np.array([s.token_ids[-1] for s in sequences])
    positions = np.array([len(s.token_ids) - 1 for s in sequences])
    anchors_at, positions_at, drafted_at, confidences_at, places = arrays_to_device(
        device, anchors, positions, drafted, confidences, probs_at
    )
    return Standing(
        anchors_at,
        positions_at,
        drafted_at,
        confidences_at,
        torch.stack(probs) if probs else None,
        places if probs else None,
    )


def _confidences_of(survival: FloatArray) -> FloatArray:
    """Whose running product it is. [n]"""
    before = np.concatenate(([1.0], survival[:-1]))
    return np.divide(survival, before, out=np.zeros_like(survival), where=before > 0).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Decision:
    """What the host decides about a step before it knows where the requests stand."""

    budget: int  # draft tokens to verify at most, the highest survivals of all requests
    longest: IntArray  # [R] draft tokens of each at most; 0: it has none
    block_tables: NDArray[np.int32]  # [R, W]
    num_blocks: IntArray  # [R] how many of them it owns
    num_rows: int  # N ≥ R + budget
    chosen: IntArray  # [R'] rows of those who are drafted afterwards
    width: int  # tokens of each


@dataclass(frozen=True, slots=True)
class Placed:
    """A decision on the device, with the random numbers of its step."""

    budget: Tensor  # [1] int32
    longest: Tensor  # [R] int64
    tables: Tensor  # [R, W] int32
    capacity: Tensor  # [R] int64 tokens that its blocks hold
    uniforms: Tensor | None  # [R, n + 1] fp64, with the rejection rule
    draw_keys: Tensor | None  # [R] int64
    chosen: Tensor | None  # [R'] int64; None: all
    sampled: Tensor  # [S] int64 which of the chosen ones are
    sampled_rows: Tensor  # [S] int64 which of the roster's these are
    draft_keys: Tensor  # [n', S] int64 of those without shared noise; 0 with it
    probs_at: Tensor  # [R] int64 places of the roster's among the sampled; anything for others


def place(decision: Decision, roster: Roster, width: int, block_size: int, device: torch.device) -> Placed:
    """One copy. `width`: of the drafts at hand."""
    count = len(roster)
    sampled = np.flatnonzero(roster.is_sampled[decision.chosen])
    sampled_rows = decision.chosen[sampled]
    uniforms, draw_keys = np.zeros((count, width + 1)), np.zeros(count, dtype=np.int64)
    for row in np.flatnonzero(roster.is_drawn):
        rng = roster.sequences[row].rng
        uniforms[row] = rng.random(width + 1)
        draw_keys[row] = rng.integers(-(2**63), 2**63, dtype=np.int64)
    draft_keys = np.zeros((decision.width, len(sampled)), dtype=np.int64)
    for column, row in enumerate(sampled_rows):
        if roster.is_drawn[row]:
            draft_keys[:, column] = keys_of(roster.sequences[row].rng.random(decision.width))
    probs_at = np.zeros(count, dtype=np.int64)
    probs_at[sampled_rows] = np.arange(len(sampled))
    budget = np.array([decision.budget], dtype=np.int32)
    placed = arrays_to_device(
        device,
        *(budget, decision.longest, decision.block_tables, decision.num_blocks * block_size),
        *(uniforms, draw_keys, decision.chosen, sampled, sampled_rows, draft_keys, probs_at),
    )
    draws = roster.is_drawn.any()
    return Placed(
        budget=placed[0],
        longest=placed[1],
        tables=placed[2],
        capacity=placed[3],
        uniforms=placed[4] if draws else None,
        draw_keys=placed[5] if draws else None,
        chosen=placed[6] if len(decision.chosen) < count else None,
        sampled=placed[7],
        sampled_rows=placed[8],
        draft_keys=placed[9],
        probs_at=placed[10],
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """The flat batch of a step whose lengths were chosen on the device. N rows, pad rows among them."""

    lens: Tensor  # [R] int64 draft tokens verified of each
    row_start: Tensor  # [R + 1] int32
    owner: Tensor  # [N] int64 whose row it is; the last request's number for a pad row
    offset: Tensor  # [N] int64 its place among the request's
    is_pad: Tensor  # [N] bool
    drafted: Tensor  # [N] int64 the draft token that the row decides about
    flat: FlatRows  # what the target's pass takes


def spread(decision: Decision, placed: Placed, roster: Roster, at: Standing, block_size: int) -> Rows:
    """Lengths, then rows."""
    device, count, total_rows = at.anchors.device, len(roster), decision.num_rows
    # ℓ drafts emit up to ℓ + 1 tokens; more than what may still be emitted is waste, and has no block.
    remaining = roster.ends - at.positions - 1
    longest = torch.minimum(placed.longest, torch.minimum(remaining, placed.capacity - at.positions) - 1)
    longest = longest.clamp(min=0)
    lens = torch.zeros_like(longest)
    if decision.budget:
        lens = survival_lengths(at.confidences, placed.budget, longest.int()).long()
    ends = (lens + 1).cumsum(0)
    row_start = torch.cat([ends.new_zeros(1), ends])
    rows = torch.arange(total_rows, device=device)
    owner = torch.searchsorted(ends, rows, right=True)
    is_pad = owner == count
    owner = owner.clamp(max=count - 1)
    offset = torch.where(is_pad, 0, rows - row_start[owner])
    blocks = torch.cat([at.anchors[:, None], at.drafted, at.anchors[:, None]], dim=1)  # [R, 1 + n + 1]
    positions = torch.where(is_pad, 0, at.positions[owner] + offset)
    block = placed.tables[owner, positions // block_size].long()
    slots = torch.where(is_pad, -1, block * block_size + positions % block_size)
    # A pad row is a request of one row and one key, as in `graphs.py`; those after them have none.
    pads = torch.arange(1, total_rows - count + 1, device=device)
    is_there = pads <= total_rows - ends[-1]
    width = placed.tables.shape[1]
    paged = PagedBatch(
        query_start=torch.cat([row_start, (ends[-1] + pads).clamp(max=total_rows)]).int(),
        kv_len=torch.cat([at.positions + lens + 1, is_there.long()]).int(),
        block_tables=torch.cat([placed.tables, placed.tables.new_zeros((total_rows - count, width))]),
        block_size=block_size,
        max_query=at.width + 1,
        max_kv=width * block_size,
        row_request=torch.where(is_pad, -1, owner).int(),
    )
    return Rows(
        lens,
        row_start.int(),
        owner,
        offset,
        is_pad,
        blocks[owner, offset + 1],
        FlatRows(torch.where(is_pad, 0, blocks[owner, offset]), positions, slots, paged),
    )


def judge(
    logits: Tensor, rows: Rows, placed: Placed, roster: Roster, at: Standing, vocab_map: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Every rule of the batch over all its rows. logits [N, V] → tokens that stand, and the target's own
    after them, [R] int64 each. The rules' rows are not told apart before: their number is not known here."""
    given = JudgedRows(
        logits,
        rows.drafted,
        rows.owner,
        rows.row_start,
        at.width,
        filters=roster.target_filters,
        noise_keys=_noise_keys(rows, roster, at),
        uniforms=None if placed.uniforms is None else placed.uniforms[rows.owner, rows.offset],
        draw_keys=placed.draw_keys,
        draft_probs=_draft_probs(rows, at),
    )
    counts, following = RULES[roster.rules_used[0]](given, vocab_map)
    for rule in roster.rules_used[1:]:
        own_counts, own_following = RULES[rule](given, vocab_map)
        is_own = roster.rules == RULE_ORDER.index(rule)
        counts = torch.where(is_own, own_counts, counts)
        following = torch.where(is_own, own_following, following)
    return counts, following


def _noise_keys(rows: Rows, roster: Roster, at: Standing) -> Tensor | None:
    if AcceptanceRule.SHARED_NOISE not in roster.rules_used:
        return None
    places = at.positions + 1 - roster.prompts  # of the first token that each emits
    return keys_at(roster.noise_bases[rows.owner], places[rows.owner] + rows.offset)


def _draft_probs(rows: Rows, at: Standing) -> Tensor | None:
    if at.draft_probs is None or at.probs_at is None:
        return None
    flat = at.draft_probs.reshape(-1, at.draft_probs.shape[-1])
    return flat[at.probs_at[rows.owner] * at.width + rows.offset.clamp(max=at.width - 1)]


def draft_requests(
    decision: Decision, placed: Placed, roster: Roster, anchors: Tensor, positions: Tensor
) -> DeviceRequests:
    """Those who are drafted, after their verdicts. anchors and positions [R], the new ones"""

    def of(values: Tensor) -> Tensor:
        return values if placed.chosen is None else values[placed.chosen]

    draws = None
    if len(placed.sampled_rows):
        assert roster.draft_filters is not None
        places = positions + 1 - roster.prompts  # of the first drafted token
        slots = torch.arange(decision.width, device=positions.device)
        noise = keys_at(roster.noise_bases[placed.sampled_rows], places[placed.sampled_rows] + slots[:, None])
        shared = roster.rules == RULE_ORDER.index(AcceptanceRule.SHARED_NOISE)
        keys = torch.where(shared[placed.sampled_rows], noise, placed.draft_keys)
        all_sampled = len(placed.sampled_rows) == len(decision.chosen)
        filters: SamplingRows = roster.draft_filters.select(placed.sampled_rows)
        draws = Draws(filters, keys, None if all_sampled else placed.sampled)
    return DeviceRequests(
        anchors=of(anchors),
        positions=of(positions),
        block_tables=of(placed.tables),
        context_from=of(roster.context_from),
        rules=of(roster.rules),
        num_tokens=decision.width,
        draws=draws,
        keeps_probs=bool(roster.is_drawn[decision.chosen].any()),
    )


@dataclass(frozen=True, slots=True)
class Found:
    """What a step found, as the host reads it."""

    lens: list[int]  # [R] draft tokens verified
    counts: list[int]  # [R] how many of them stand
    following: list[int]  # [R] the target's own token after those
    drafted: list[list[int]]  # [R'][n] of those who were drafted
    confidences: FloatArray  # [R', n]


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device works on, or is through with."""

    roster: Roster
    decision: Decision
    standing: Standing  # after it
    draft_probs: Tensor | None  # [S, n, Vd] of the drafts that it makes
    copy: HostCopy

    def read(self) -> Found:
        """Waits for it."""
        count, chosen, width = len(self.roster), len(self.decision.chosen), self.decision.width
        whole = self.copy.wait()
        lens, counts, following = whole[: 3 * count].view(3, count).long().tolist()
        tokens, confidences = whole[3 * count :].view(2, chosen, width).unbind(0)
        return Found(lens, counts, following, tokens.long().tolist(), confidences.float().numpy())


def pack_found(*parts: Tensor) -> HostCopy:
    """Integers below 2^53 and floats, in one copy."""
    return HostCopy(torch.cat([part.reshape(-1).double() for part in parts]))
