"""Steps launched before the one that runs is read: the device never waits for the host between two of them.

Step n is launched; while the device works on it, the host prepares step n + 1 and launches that behind it;
then it reads n, which is done or soon will be, and the device goes on with n + 1. So what the host decides
about a step (who is in it, blocks, the budget, who is drafted) it decides without the results of the step
before: blocks are taken for the most that step may emit, and budgets come from scores that are a step older
than otherwise, two at least. What depends on those results (tokens, positions, lengths) is decided on the
device (device_step.py).

A request that ended in step n is still in step n + 1: what that found of it is dropped unread.

Prompts are computed in the same steps: their rows are the host's, and a request whose last prompt row runs
decodes in the next step, from a token that the host has not read.

Steps that this cannot do are planned and read one by one, as on a CPU (`Engine._step`), once the step that
runs has been read: those that must preempt, and those with requests whose rules, logits or adapters need the
host (`why_not`).
"""

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dspark_ray.core.config import AppConfig
from dspark_ray.core.types import RequestOutput, VerificationMode
from dspark_ray.engine.acceptance import Verdict
from dspark_ray.engine.batch import Work
from dspark_ray.engine.device_step import (
    NO_PROMPTS,
    Decision,
    Found,
    Launched,
    Placed,
    Roster,
    Rows,
    Standing,
    draft_requests,
    judge,
    pack_found,
    place,
    prompts_of,
    spread,
    standing_of,
    with_prompts,
)
from dspark_ray.engine.sequence import Sequence
from dspark_ray.models.drafters.base import ContextRows, DeviceDrafter, DraftBlock
from dspark_ray.models.targets.decoder import Decoder, DecoderOutput
from dspark_ray.models.transfer import arrays_to_device
from dspark_ray.scheduling.live_costs import StepSize
from dspark_ray.scheduling.speculation import Load

if TYPE_CHECKING:
    from dspark_ray.engine.engine import Engine

logger = logging.getLogger(__name__)


def goes_ahead(config: AppConfig, target: Decoder) -> bool:
    """`engine.ahead`, where the target's passes are this process's alone."""
    wanted = config.engine.ahead
    if wanted == "off" or (wanted == "auto" and target.device.type == "cpu"):
        return False
    if not target.can_be_captured:
        logger.warning("steps are read one by one: other ranks are told of each")
        return False
    return True


class Ahead:
    """One per engine; belongs to its step loop. At most one launched step is unread between two calls."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._running: Launched | None = None
        self._roster: Roster | None = None
        self.num_launched = 0  # steps so far
        self._since_ms = 0.0  # when the device began with the oldest unread step, as far as the host knows

    def step(self) -> list[RequestOutput] | None:
        """The outputs of one step, the next one launched. None: nothing was launched, and the next step is
        none for here."""
        running = self._running
        if running is None:
            self._since_ms = self._engine.now_ms()
            running = self._launch(None)
            if running is None:
                self._roster = None  # its requests' contexts may begin elsewhere after a step by the host
                return None
        self._running = self._launch(running)
        return self._read(running)

    def finish(self) -> list[RequestOutput]:
        """Reads the step that runs: the host knows all that has been computed then."""
        running, self._running, self._roster = self._running, None, None
        return [] if running is None else self._read(running)

    def drop(self) -> None:
        """Nobody wants the step that runs."""
        self._running = self._roster = None

    def why_not(self) -> str:
        """Why the next step must be prepared when all before it are read; empty: it need not."""
        engine, drafter = self._engine, self._engine.drafter
        if drafter is not None and not (isinstance(drafter, DeviceDrafter) and drafter.drafts_on_device):
            return "the drafter needs the host"
        if not engine.budget.can_choose_unseen():
            return "lengths are chosen by the scores at hand"
        if engine.draft_log is not None:
            return "drafts are being logged"
        starts = engine.admission.next_to_start()
        present = engine.admission.running if starts is None else [*engine.admission.running, starts]
        return next((why for s in present if (why := _why_not(s))), "")

    # -- the host's part, before a launch ------------------------------------------------------------

    def _launch(self, behind: Launched | None) -> Launched | None:
        """The next step, after `behind`. None: there is none, or it cannot be launched from here."""
        if self.why_not():
            return None
        before = {} if behind is None else behind.rows()
        # Each step emits a token at least: some requests are sure to end with the one that runs.
        going = [
            s
            for s in self._engine.admission.running
            if (s in before or s.is_decoding) and s.remaining_tokens > (s in before)
        ]
        planned = self._decide(going, behind, before)
        if planned is None:
            return None
        decision, prompts = planned
        device = self._engine.target.device
        roster = self._roster_of([*going, *(item.sequence for item in prompts)])
        if behind is None:
            standing = standing_of(going, device)
        elif roster is behind.roster and not prompts:
            standing = behind.standing
        else:
            (rows,) = arrays_to_device(device, np.array([before[s] for s in going], dtype=np.int64))
            standing = behind.standing.select(rows)
        self.num_launched += 1
        launched = self._run(decision, roster, standing)
        self._note_prompts(prompts)
        return launched

    def _note_prompts(self, prompts: list[Work]) -> None:
        """Rows of prompts count as computed once they are launched: whatever reads them comes later."""
        for item in prompts:
            sequence = item.sequence
            if sequence.queue_ms is None:
                sequence.queue_ms = self._engine.now_ms() - sequence.queued_ms
            if item.needs_logits:  # its last row stays its anchor, until the token is read
                sequence.num_computed += item.num_rows - 1
            else:
                self._engine.settle(item, None, None, in_full=False)

    def _roster_of(self, sequences: list[Sequence]) -> Roster:
        """The last one where they are the same."""
        if self._roster is None or self._roster.sequences != tuple(sequences):
            engine, drafter = self._engine, self._engine.drafter
            size = engine.target.config.vocab_size
            drafts_from = size if drafter is None or drafter.vocab_map is None else len(drafter.vocab_map)
            digest = None if drafter is None else next(iter(drafter.context_digests), None)
            self._roster = Roster(sequences, digest, (size, drafts_from), engine.target.device)
        return self._roster

    def _decide(
        self, going: list[Sequence], behind: Launched | None, before: dict[Sequence, int]
    ) -> tuple[Decision, list[Work]] | None:
        """Blocks, budget, prompts, drafts; None where blocks run out, or nothing is to be done."""
        engine, admission, budget = self._engine, self._engine.admission, self._engine.budget
        emitted, drafted = self._pending(going, behind, before)
        longest = np.array(
            [self._longest(s, count) for s, count in zip(going, drafted, strict=True)], dtype=np.int64
        )
        room = []
        for sequence, count, most in zip(going, emitted, longest, strict=True):
            end = sequence.num_prompt + sequence.request.sampling.max_tokens
            known = min(len(sequence.token_ids) + count, end)
            room.append((sequence, known, min(int(most), end - known)))
        if not admission.make_room_ahead(room):
            return None
        load, pending = engine.load(going), int(behind is not None)
        chosen_budget = 0
        if longest.any():
            chosen_budget = budget.choose_unseen(going, longest, pending, load, engine.now_ms())
        prompts = self._prompts(before, admission.max_step_rows - len(going) - chosen_budget)
        members = [*going, *(item.sequence for item in prompts)]
        if not members:
            return None
        chosen = self._to_draft(members, prompts, before, load)
        tables = np.zeros((len(members), max(len(s.blocks) for s in members)), dtype=np.int32)
        for table, sequence in zip(tables, members, strict=True):
            table[: len(sequence.blocks)] = sequence.blocks
        num_rows = len(going) + chosen_budget + sum(item.num_rows for item in prompts)
        size = None
        if engine.graphs is not None and not prompts:
            size = engine.graphs.size_for(num_rows, 1 + max(drafted))
        decision = Decision(
            prompts=prompts_of(prompts) if prompts else NO_PROMPTS,
            budget=chosen_budget,
            longest=np.concatenate([longest, np.zeros(len(prompts), dtype=np.int64)]),
            block_tables=tables,
            num_blocks=np.array([len(s.blocks) for s in members]),
            num_rows=size or num_rows,
            chosen=np.array(chosen, dtype=np.int64),
            width=budget.draft_tokens() if chosen else 0,
        )
        return decision, prompts

    def _prompts(self, before: dict[Sequence, int], rows_left: int) -> list[Work]:
        """Chunks that fit; those whose last row runs are past that."""
        admission = self._engine.admission
        running = [s for s in admission.running if not s.is_decoding and s not in before]
        return admission.fill_prompts(running, rows_left, lambda s: not _why_not(s))

    def _to_draft(
        self, members: list[Sequence], prompts: list[Work], before: dict[Sequence, int], load: Load
    ) -> list[int]:
        """Rows of the roster that are drafted after the step."""
        engine = self._engine
        if engine.drafter is None:
            return []
        unfinished = {item.sequence for item in prompts if not item.needs_logits}
        emitting = [s for s in members if s not in unfinished]
        wanted = set(engine.budget.wants_draft(emitting, load))
        # A token comes of this step, and one of the step that runs, if it is in that: with one more to come,
        # a draft is of no use.
        return [
            row
            for row, s in enumerate(members)
            if s in wanted and engine.context_cap(s) > 0 and s.remaining_tokens > 2 + (s in before)
        ]

    def _pending(
        self, going: list[Sequence], behind: Launched | None, before: dict[Sequence, int]
    ) -> tuple[list[int], list[int]]:
        """By request: tokens that the step which runs may emit, and tokens that it drafts."""
        if behind is None:
            return [0] * len(going), [len(s.draft.token_ids) if s.draft else 0 for s in going]
        decision, chosen = behind.decision, set(behind.decision.chosen.tolist())
        most = np.minimum(decision.longest, decision.budget)
        rows = [before[s] for s in going]
        return [1 + int(most[row]) for row in rows], [decision.width * (row in chosen) for row in rows]

    def _longest(self, sequence: Sequence, num_drafted: int) -> int:
        """Draft tokens that the host lets the device verify of it, as far as it knows."""
        config, sampling = self._engine.config.speculation, sequence.request.sampling
        limits = [num_drafted, self._engine.context_cap(sequence)]
        if sampling.max_draft_tokens is not None:
            limits.append(sampling.max_draft_tokens)
        if config.mode is VerificationMode.FIXED and config.fixed_tokens is not None:
            limits.append(config.fixed_tokens)
        return min(limits)

    # -- the device's part: nothing here waits ---------------------------------------------------------

    def _run(self, decision: Decision, roster: Roster, at: Standing) -> Launched:
        engine, drafter = self._engine, self._engine.drafter
        size, device = engine.pool.block_size, engine.target.device
        placed = place(decision, roster, at.width, size, device)
        at = with_prompts(at, placed)
        rows = spread(decision, placed, roster, at, size)
        output, logits = self._forward(rows)
        vocab_map = None if drafter is None else drafter.vocab_map
        counts, following = judge(logits, rows, placed, roster, at, vocab_map)
        anchors, positions = following, at.positions + 1 + counts
        drafted = at.drafted.new_zeros((len(roster), decision.width))
        confidences = at.confidences.new_zeros((len(roster), decision.width))
        probs, found = None, [rows.lens, counts, following]
        if drafter is not None:
            drafter.commit(_committed(output.taps, rows, placed, counts, following, bool(decision.width)))
        if decision.width:
            assert isinstance(drafter, DeviceDrafter)
            block = drafter.propose_on_device(draft_requests(decision, placed, roster, anchors, positions))
            found += [block.token_ids, block.confidences]
            drafted, confidences, probs = block.token_ids, block.confidences, block.draft_probs
            if placed.chosen is not None:
                drafted = at.drafted.new_zeros((len(roster), decision.width))
                confidences = at.confidences.new_zeros((len(roster), decision.width))
                drafted.index_copy_(0, placed.chosen, block.token_ids)
                confidences.index_copy_(0, placed.chosen, block.confidences)
        standing = Standing(
            anchors, positions, drafted, confidences, probs, None if probs is None else placed.probs_at
        )
        return Launched(roster, decision, standing, probs, pack_found(*found))

    def _forward(self, rows: Rows) -> tuple[DecoderOutput, Tensor]:
        """The target's pass over all rows, and the logits of those that are judged [M, V]."""
        engine, flat = self._engine, rows.flat
        taps = engine.drafter.taps if engine.drafter else ()
        count = len(flat.token_ids)
        if engine.graphs is not None and engine.graphs.size_for(count, flat.paged.max_query) == count:
            output = engine.graphs.run_rows(flat, taps)
        else:
            assert flat.slots is not None
            output = engine.target.forward(
                flat.token_ids, flat.positions, engine.kv, flat.slots, flat.paged, taps
            )
        hidden = output.hidden if rows.of_flat is None else output.hidden[rows.of_flat]
        return output, engine.target.logits(hidden)

    # -- the host's part, once a step is read ------------------------------------------------------------

    def _read(self, launched: Launched) -> list[RequestOutput]:
        """Waits for the step; the outputs of the requests that are still here."""
        engine, found = self._engine, launched.read()
        live = [row for s, row in launched.rows().items() if engine.runs(s)]
        work, outputs = self._settle(launched, found, live)
        still = [row for row in live if engine.runs(launched.roster.sequences[row])]
        prompts, measured_ms = launched.decision.prompts, engine.now_ms() - self._since_ms
        prompt_rows = int(prompts.lead.sum()) + len(prompts.anchors)
        num_drafted = self._keep_drafts(launched, found, set(still), prompt_rows, measured_ms)
        if work or prompt_rows:
            engine.counters.target_steps += 1
            context_tokens = sum(item.sequence.num_computed for item in work if item.decoding)
            engine.note_step(
                work,
                sum(item.num_rows for item in work if item.decoding) + prompt_rows,
                context_tokens,
                num_drafted,
                launched.decision.width,
                measured_ms,
            )
            self._since_ms += measured_ms
        if not engine.has_work():
            self.drop()
        return outputs

    def _settle(
        self, launched: Launched, found: Found, live: list[int]
    ) -> tuple[list[Work], list[RequestOutput]]:
        engine, decision = self._engine, launched.decision
        work, outputs, outcomes = [], [], []
        in_full = decision.budget >= decision.longest.sum()
        for row in live:
            sequence = launched.roster.sequences[row]
            if decision.longest[row]:
                engine.budget.note_length(sequence, found.lens[row])
            item = Work(sequence, 1 + found.lens[row], decoding=row < decision.num_decoding)
            verdict = Verdict(found.counts[row], found.following[row])
            output, outcome = engine.settle(item, verdict, None, in_full=bool(in_full))
            work.append(item)
            outputs += [] if output is None else [output]
            outcomes += [] if outcome is None else [outcome]
        if engine.drafter is not None:
            engine.learn(outcomes)
        return work, outputs

    def _keep_drafts(
        self, launched: Launched, found: Found, still: set[int], prompt_rows: int, measured_ms: float
    ) -> int:
        """Those of requests that go on; how many. How long they took is their share of the whole step."""
        decision, sequences = launched.decision, launched.roster.sequences
        kept = [place for place, row in enumerate(decision.chosen.tolist()) if row in still]
        if not kept:
            return 0
        rows = [int(decision.chosen[place]) for place in kept]
        block = DraftBlock(
            [found.drafted[place] for place in kept],
            found.confidences[kept],
            self._probs_of(launched, rows),
        )
        verified = sum(found.lens)
        size = StepSize(decision.num_decoding + verified, verified, prompt_rows)
        share = self._engine.budget.drafting_share(size, len(decision.chosen), decision.width)
        drafted = [sequences[row] for row in rows]
        self._engine.keep_drafts(drafted, block, decision.width, share * measured_ms)
        return len(kept)

    def _probs_of(self, launched: Launched, rows: list[int]) -> list[Tensor | None]:
        """q of the drafts of these rows [n, Vd]; None: one-hot. They stay where they are."""
        probs, roster = launched.draft_probs, launched.roster
        if probs is None:
            return [None] * len(rows)
        chosen = launched.decision.chosen
        places = {int(row): place for place, row in enumerate(chosen[roster.is_sampled[chosen]])}
        return [probs[places[row]] if roster.is_drawn[row] else None for row in rows]


def _why_not(sequence: Sequence) -> str:
    """What of a request needs the host between two steps; empty: nothing."""
    request = sequence.request
    if sequence.adjuster is not None:
        return "a request has rules of the host"
    if request.sampling.logprobs is not None or request.sampling.prompt_logprobs is not None:
        return "a request wants log-probabilities"
    return "" if request.adapter is None else "a request has an adapter"


def _committed(
    taps: Tensor, rows: Rows, placed: Placed, counts: Tensor, following: Tensor, is_drafted: bool
) -> ContextRows:
    """Rows of tokens that stand, the others with slot −1. A captured pass overwrites its taps: they are
    copied where nothing is drafted, and they may have to wait."""
    owner, is_pad = rows.flat_share.owner, rows.flat_share.is_pad
    count, after = counts[owner], torch.where(placed.after < 0, following, placed.after)
    assert rows.flat.slots is not None
    return ContextRows(
        taps if is_drafted else taps.clone(),
        rows.flat.positions,
        rows.flat.slots.masked_fill(is_pad | (rows.place > count), -1),
        rows.next_ids.where(rows.place < count, after[owner]),
    )
