"""One step that the device carries out by itself: it chooses the lengths under the budget it is
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
from dspark_ray.engine.batch import Work
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
    anchors = np.array([s.token_ids[-1] for s in sequences], dtype=np.int64)
    positions = np.array([len(s.token_ids) - 1 for s in sequences], dtype=np.int64)
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
class Prompts:
    """Chunks of prompts in a step: the last P requests of its roster. Of each the last row is its anchor's,
    and there are others before it."""

    anchors: IntArray  # [P] tokens of the last rows
    positions: IntArray  # [P] theirs
    emits: NDArray[np.bool_]  # [P] whether that is the last token so far, so that one comes out
    after: IntArray  # [P] the token after it; 0 where one comes out
    lead: IntArray  # [P] rows before it
    lead_ids: IntArray  # [Σ lead] their tokens


NO_PROMPTS = Prompts(*(np.zeros(0, dtype=t) for t in (np.int64, np.int64, np.bool_, *[np.int64] * 3)))


def prompts_of(work: Seq[Work]) -> Prompts:
    """Chunks as the host has chosen them."""
    anchors, positions, after, lead_ids = [], [], [], []
    for item in work:
        tokens, first = item.sequence.token_ids, item.sequence.num_computed
        last = first + item.num_rows - 1
        anchors.append(tokens[last])
        positions.append(last)
        after.append(0 if item.needs_logits else tokens[last + 1])
        lead_ids += tokens[first:last]
    return Prompts(
        np.array(anchors, dtype=np.int64),
        np.array(positions, dtype=np.int64),
        np.array([item.needs_logits for item in work], dtype=np.bool_),
        np.array(after, dtype=np.int64),
        np.array([item.num_rows - 1 for item in work], dtype=np.int64),
        np.array(lead_ids, dtype=np.int64),
    )


@dataclass(frozen=True, slots=True)
class Decision:
    """What the host decides about a step before it knows where the requests stand."""

    prompts: Prompts
    budget: int  # draft tokens to verify at most, the highest survivals of all requests
    longest: IntArray  # [R] draft tokens of each at most; 0: it has none
    block_tables: NDArray[np.int32]  # [R, W]
    num_blocks: IntArray  # [R] how many of them it owns
    num_rows: int  # N ≥ R + budget + Σ lead
    chosen: IntArray  # [R'] rows of those who are drafted afterwards
    width: int  # tokens of each

    @property
    def emits(self) -> NDArray[np.bool_]:
        """[R] whether a token comes out."""
        return np.concatenate([np.ones(self.num_decoding, dtype=np.bool_), self.prompts.emits])

    @property
    def num_decoding(self) -> int:
        """The first so many decode; the others are prompts."""
        return len(self.longest) - len(self.prompts.anchors)


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
    anchors: Tensor  # [P] int64 of prompts, as are those that follow
    positions: Tensor  # [P] int64
    after: Tensor  # [R] int64, −1 where a token comes out
    lead: Tensor | None  # [R] int64; None: no prompt has rows before its last
    lead_end: Tensor  # [R] int64 where its tokens end in `lead_ids`
    lead_ids: Tensor  # [Σ lead] int64


def with_prompts(decoding: Standing, placed: Placed) -> Standing:
    """The prompts' last rows behind those who decode: nothing is drafted of them."""

    def longer(values: Tensor, more: Tensor | None = None) -> Tensor:
        zeros = values.new_zeros((len(placed.anchors), *values.shape[1:]))
        return torch.cat([values, zeros if more is None else more])

    if not len(placed.anchors):
        return decoding
    return Standing(
        longer(decoding.anchors, placed.anchors),
        longer(decoding.positions, placed.positions),
        longer(decoding.drafted),
        longer(decoding.confidences),
        decoding.draft_probs,
        None if decoding.probs_at is None else longer(decoding.probs_at),
    )


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
    prompts, no_rows = decision.prompts, np.zeros(decision.num_decoding, dtype=np.int64)
    lead = np.concatenate([no_rows, prompts.lead])
    after = np.concatenate([no_rows - 1, np.where(prompts.emits, -1, prompts.after)])
    placed = arrays_to_device(
        device,
        *(budget, decision.longest, decision.block_tables, decision.num_blocks * block_size),
        *(uniforms, draw_keys, decision.chosen, sampled, sampled_rows, draft_keys, probs_at),
        *(prompts.anchors, prompts.positions, after, lead, lead.cumsum(), prompts.lead_ids),
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
        anchors=placed[11],
        positions=placed[12],
        after=placed[13],
        lead=placed[14] if len(prompts.lead_ids) else None,
        lead_end=placed[15],
        lead_ids=placed[16],
    )


@dataclass(frozen=True, slots=True)
class Share:
    """Whose each of some rows is, where only the device knows. M rows, pad rows behind the requests'."""

    start: Tensor  # [R + 1] int64 first row of each request
    owner: Tensor  # [M] int64; the last request's number for a pad row
    offset: Tensor  # [M] int64 its place among the request's; 0 for a pad row
    is_pad: Tensor  # [M] bool


def share_out(sizes: Tensor, total_rows: int) -> Share:
    """Rows of R requests side by side. sizes [R] int64"""
    ends = sizes.cumsum(0)
    start = torch.cat([ends.new_zeros(1), ends])
    rows = torch.arange(total_rows, device=sizes.device)
    owner = torch.searchsorted(ends, rows, right=True)
    is_pad = owner == len(sizes)
    owner = owner.clamp(max=len(sizes) - 1)
    return Share(start, owner, torch.where(is_pad, 0, rows - start[owner]), is_pad)


@dataclass(frozen=True, slots=True)
class Rows:
    """The flat batch of a step whose lengths were chosen on the device: N rows, of which M are judged."""

    lens: Tensor  # [R] int64 draft tokens verified of each
    judged: Share  # an anchor and its draft tokens
    drafted: Tensor  # [M] int64 the draft token that the row decides about
    of_flat: Tensor | None  # [M] int64 which rows of the batch those are; None: all, in order
    flat_share: Share
    place: Tensor  # [N] int64 of a row behind its request's anchor; below 0: rows of a prompt before its last
    next_ids: Tensor  # [N] int64 the token after each, where it does not depend on the verdict
    flat: FlatRows  # what the target's pass takes


def spread(decision: Decision, placed: Placed, roster: Roster, at: Standing, block_size: int) -> Rows:
    """Lengths, then rows."""
    count, total_rows = len(roster), decision.num_rows
    # ℓ drafts emit up to ℓ + 1 tokens; more than what may still be emitted is waste, and has no block.
    remaining = roster.ends - at.positions - 1
    longest = torch.minimum(placed.longest, torch.minimum(remaining, placed.capacity - at.positions) - 1)
    longest = longest.clamp(min=0)
    lens = torch.zeros_like(longest)
    if decision.budget:
        lens = survival_lengths(at.confidences, placed.budget, longest.int()).long()
    blocks = torch.cat([at.anchors[:, None], at.drafted, at.anchors[:, None]], dim=1)  # [R, 1 + n + 1]
    if placed.lead is None:
        judged = share = share_out(lens + 1, total_rows)
        place, of_flat = share.offset, None
        token_ids = blocks[share.owner, place]
    else:
        judged, share = (
            share_out(lens + 1, count + decision.budget),
            share_out(lens + 1 + placed.lead, total_rows),
        )
        place = torch.where(share.is_pad, 0, share.offset - placed.lead[share.owner])
        of_flat = (share.start[:-1] + placed.lead)[judged.owner] + judged.offset
        lead = (placed.lead_end[share.owner] + place).clamp(0, len(placed.lead_ids) - 1)
        token_ids = torch.where(place < 0, placed.lead_ids[lead], blocks[share.owner, place.clamp(min=0)])
    token_ids = torch.where(share.is_pad, 0, token_ids)
    positions = torch.where(share.is_pad, 0, at.positions[share.owner] + place)
    block = placed.tables[share.owner, positions // block_size].long()
    slots = torch.where(share.is_pad, -1, block * block_size + positions % block_size)
    paged = _paged(decision, placed, at, lens, share, block_size)
    return Rows(
        lens,
        judged,
        blocks[judged.owner, judged.offset + 1],
        of_flat,
        share,
        place,
        torch.cat([token_ids[1:], token_ids[:1]]),
        FlatRows(token_ids, positions, slots, paged),
    )


def _paged(
    decision: Decision, placed: Placed, at: Standing, lens: Tensor, share: Share, block_size: int
) -> PagedBatch:
    """A pad row is a request of one row and one key, as in `graphs.py`; those after them have none."""
    count, total_rows = len(lens), decision.num_rows
    pads = torch.arange(1, total_rows - count + 1, device=lens.device)
    is_there = pads <= total_rows - share.start[-1]
    width = placed.tables.shape[1]
    return PagedBatch(
        query_start=torch.cat([share.start, (share.start[-1] + pads).clamp(max=total_rows)]).int(),
        kv_len=torch.cat([at.positions + lens + 1, is_there.long()]).int(),
        block_tables=torch.cat([placed.tables, placed.tables.new_zeros((total_rows - count, width))]),
        block_size=block_size,
        max_query=max(at.width, int(decision.prompts.lead.max(initial=0))) + 1,
        max_kv=width * block_size,
        row_request=torch.where(share.is_pad, -1, share.owner).int(),
    )


def judge(
    logits: Tensor, rows: Rows, placed: Placed, roster: Roster, at: Standing, vocab_map: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Every rule of the batch over all its rows. logits [M, V] → tokens that stand, and the target's own
    after them, [R] int64 each. The rules' rows are not told apart before: their number is not known here."""
    given = JudgedRows(
        logits,
        rows.drafted,
        rows.judged.owner,
        rows.judged.start.int(),
        at.width,
        filters=roster.target_filters,
        noise_keys=_noise_keys(rows, roster, at),
        uniforms=None if placed.uniforms is None else placed.uniforms[rows.judged.owner, rows.judged.offset],
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
    owner = rows.judged.owner
    return keys_at(roster.noise_bases[owner], places[owner] + rows.judged.offset)


def _draft_probs(rows: Rows, at: Standing) -> Tensor | None:
    if at.draft_probs is None or at.probs_at is None:
        return None
    flat = at.draft_probs.reshape(-1, at.draft_probs.shape[-1])
    offset = rows.judged.offset.clamp(max=at.width - 1)
    return flat[at.probs_at[rows.judged.owner] * at.width + offset]


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

    def rows(self) -> dict[Sequence, int]:
        """Of those of whom a token comes out."""
        emits = self.decision.emits.tolist()
        return {s: row for row, s in enumerate(self.roster.sequences) if emits[row]}

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
