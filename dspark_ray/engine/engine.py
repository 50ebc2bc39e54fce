"""The native engine: `Engine.step()` is the whole of DSpark serving in ten lines.

Synchronous, one thread; the process around it (runtime/engine_actor.py, or an offline command) calls
`step()` while `has_work()`.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark_ray.core.clock import Clock
from dspark_ray.core.config import AppConfig
from dspark_ray.core.errors import DsparkError, QueueFullError, RequestError
from dspark_ray.core.types import (
    EngineStats,
    FinishReason,
    FloatArray,
    Request,
    RequestOutput,
    RequestUsage,
    SpeculationCounters,
    StepDetails,
    StepPlan,
    SurvivalReport,
    TokenLogprobs,
    VerificationMode,
)
from dspark_ray.engine.acceptance import Verdict, VerifyRequest
from dspark_ray.engine.adapters import Adapters
from dspark_ray.engine.admission import Admission
from dspark_ray.engine.ahead import Ahead, goes_ahead
from dspark_ray.engine.batch import VerifyBatch, Work, pack
from dspark_ray.engine.block_pool import BlockPool
from dspark_ray.engine.budget import BudgetPlanner, row_claims
from dspark_ray.engine.context_watch import ContextWatch
from dspark_ray.engine.coupling import Coupling
from dspark_ray.engine.device_acceptance import acceptor_for
from dspark_ray.engine.draft_log import DraftLog
from dspark_ray.engine.grammar import Grammars
from dspark_ray.engine.graphs import GraphedTarget
from dspark_ray.engine.hot_swap import HotSwap
from dspark_ray.engine.logprobs import prompt_logprobs, token_logprobs
from dspark_ray.engine.recent import RecentSteps, StepRecord
from dspark_ray.engine.recorder import StepRecorder
from dspark_ray.engine.sequence import Draft, Sequence
from dspark_ray.models.adjust import AdjusterFactory
from dspark_ray.models.drafters.base import ContextRows, DraftBlock, Drafter, DraftRequest, Outcome
from dspark_ray.models.targets.decoder import Decoder, DecoderOutput
from dspark_ray.models.token_rules import token_rules
from dspark_ray.models.transfer import to_device
from dspark_ray.scheduling.live_costs import StepSize
from dspark_ray.scheduling.speculation import Load
from dspark_ray.scheduling.step_table import StepTable
from dspark_ray.scheduling.survival import survival

NOT_INVARIANT = (
    "deterministic texts need kernels that compute a row alike in any batch: model.dtype bfloat16, and a CPU "
    "with AVX-512 BF16 or AMX"
)


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A verified batch: what the target said about it."""

    output: DecoderOutput
    logits: Tensor  # [M, V] of the batch's `logit_rows`


class Engine:
    """Continuous batching with draft, verify and accept in every step."""

    def __init__(
        self,
        config: AppConfig,
        target: Decoder,
        drafter: Drafter | None,
        table: StepTable | None,
        clock: Clock,
        *,
        engine_id: str = "engine",
        eos_token_ids: tuple[int, ...] = (),
        adjusters: Seq[AdjusterFactory] = (),
        grammars: Grammars | None = None,
    ) -> None:
        """`drafter` None is plain decoding. `eos_token_ids` end every request that does not ignore them.
        `adjusters` shape the logits of the requests that need it; so do `grammars`."""
        self.engine_id = engine_id
        self.config = config
        self.target = target
        self.drafter = drafter
        self.pool = BlockPool(
            config.engine.kv_num_blocks, config.engine.kv_block_size, config.engine.prefix_cache
        )
        self.kv = target.new_kv(self.pool.num_blocks * self.pool.block_size)
        self.admission = Admission(
            self.pool,
            self._forget_draft,
            max_running=config.engine.max_running,
            max_step_rows=config.engine.max_step_rows,
            max_waiting=config.engine.max_waiting,
            max_model_len=config.model.max_model_len,
            clock=clock,
            # Grammars and the like first: a rule of the sampling parameters gives way to them.
            adjusters=(
                *adjusters,
                *([grammars] if grammars is not None else []),
                token_rules(target.config.vocab_size, eos_token_ids),
            ),
        )
        self.budget = BudgetPlanner(config.speculation, table, config.engine.max_step_rows)
        self.counters = SpeculationCounters(config.speculation.num_draft_tokens)
        self.draft_log: DraftLog | None = None  # set by those who calibrate
        self.grammars = grammars
        self.adapters = Adapters(config.lora, target)
        self.hot_swap: HotSwap | None = None  # set by `build_engine`
        if drafter is not None:
            self.pool.keep_contexts(drafter.context_digests)
        self.acceptor = acceptor_for(target.device)
        self.graphs: GraphedTarget | None = None  # set by `build_engine` on a GPU
        self.recorder: StepRecorder | None = None  # set by `build_engine` where a record is configured
        self.ahead = Ahead(self) if goes_ahead(config, target) else None
        adaptive = config.speculation.mode is VerificationMode.ADAPTIVE
        self.context_watch = ContextWatch(config.speculation.num_draft_tokens) if adaptive else None
        self._coupling = Coupling(self.budget, clock)
        self._recent = RecentSteps(clock)
        self._clock = clock
        self._eos = frozenset(eos_token_ids)
        self._sequences: dict[str, Sequence] = {}
        self._shed: list[tuple[str, QueueFullError]] = []
        self._held: list[RequestOutput] = []  # of a step that had to be read between two calls
        self._claimed_tokens = 0.0  # that the scores promised of the step at hand
        self._num_finished = self._num_aborted = 0

    # -- requests ----------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queues a request. `RequestError` if it can never run, `QueueFullError` if too many wait."""
        assert request.request_id not in self._sequences, f"request id {request.request_id!r} is in use"
        if request.sampling.deterministic and not self.target.is_batch_invariant:
            raise RequestError(NOT_INVARIANT, param="deterministic", code="unsupported_parameter")
        self.adapters.acquire(request.adapter)
        try:
            sequence = self.admission.add(request)
        except DsparkError:
            self.adapters.release(request.adapter)
            raise
        sequence.queued_ms = self._clock.now_ms()
        self._sequences[request.request_id] = sequence
        self._forget_shed()
        if self.recorder is not None:
            self.recorder.arrived(request.request_id)

    def slow_work(self, request: Request) -> Callable[[], object] | None:
        """What makes this request quick to add, for a thread beside the step loop; None: it is already. The
        work may raise `RequestError`."""
        grammar = self.grammars.slow_work(request) if self.grammars is not None else None
        works = [work for work in (grammar, self.adapters.slow_work(request)) if work is not None]
        return (lambda: [work() for work in works]) if works else None

    def abort(self, request_id: str) -> bool:
        """Drops a request at once and frees all it holds; False if it is not here (any more)."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        sequence.finish_reason = FinishReason.ABORT
        self._drop(sequence)
        self._num_aborted += 1
        if self.recorder is not None:
            self.recorder.ended(sequence)
        self._held = [output for output in self._held if output.request_id != request_id]
        if self.ahead is not None and not self._sequences:
            self.ahead.drop()
        return True

    def take_shed(self) -> list[tuple[str, QueueFullError]]:
        """Requests that had to leave the queue, since it was full or their time was up; each told once."""
        shed, self._shed = self._shed, []
        return shed

    def _forget_shed(self) -> None:
        for request_id, error in self.admission.waiting.take_shed():
            sequence = self._sequences.pop(request_id)
            sequence.finish_reason = FinishReason.ABORT
            self.adapters.release(sequence.request.adapter)
            if self.recorder is not None:
                self.recorder.ended(sequence)
            self._shed.append((request_id, error))

    def _drop(self, sequence: Sequence) -> None:
        self.admission.drop(sequence)
        self.adapters.release(sequence.request.adapter)

    def usage(self, request_id: str) -> RequestUsage | None:
        """What a request has cost so far; None if it is not here (any more)."""
        sequence = self._sequences.get(request_id)
        return sequence.usage() if sequence else None

    def has_work(self) -> bool:
        return bool(self._sequences or self._held)

    def runs(self, sequence: Sequence) -> bool:
        """Whether it is here still, and not another one of its name."""
        return self._sequences.get(sequence.request.request_id) is sequence

    # -- the step ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """One target step: the new tokens of every request that got some. Where it can, it is one that was
        launched before (engine/ahead.py)."""
        held, self._held = self._held, []
        self.begin_step()
        outputs = None if self.ahead is None else self.ahead.step()
        return held + (self._step() if outputs is None else outputs)

    def begin_step(self) -> None:
        """Whose time is up goes."""
        self._coupling.expire()
        self.admission.waiting.expire()
        self._forget_shed()

    def _step(self) -> list[RequestOutput]:
        """One that is planned, carried out and read."""
        started_ms = self.now_ms()
        work = self._plan()
        if not work:
            return []
        batch, forwarded = self.forward(pack(work, self.pool.block_size))
        verdicts = self._accept(batch, forwarded)
        outputs = self._commit(batch, forwarded, verdicts)
        num_drafted = self._draft()
        self.note_step(
            batch.work,
            len(batch.token_ids),
            batch.context_tokens,
            num_drafted,
            self.budget.draft_tokens(),
            self.now_ms() - started_ms,
        )
        if self.hot_swap is not None:
            self.hot_swap.tick()
        return outputs

    def _plan(self) -> list[Work]:
        """Blocks first, then lengths by the budget, then prefill in the rows that are left."""
        decoding = self.admission.make_room()
        room = [min(self.admission.draft_room(s), self.context_cap(s)) for s in decoding]
        explore = self.drafter is not None and self.drafter.wants_full_verification()
        decision = self.budget.choose(
            decoding, room, self.load(decoding), self._clock.now_ms(), explore=explore
        )
        work = self.admission.fill(decoding, decision.lens.tolist())
        for item in work:
            if item.sequence.queue_ms is None:
                item.sequence.queue_ms = self._clock.now_ms() - item.sequence.queued_ms
        return work

    def context_cap(self, sequence: Sequence) -> int:
        """Draft tokens that contexts of its length are worth at most."""
        watch = self.context_watch
        return self.counters.block_size if watch is None else watch.cap(len(sequence.token_ids))

    def load(self, decoding: Seq[Sequence]) -> Load:
        """What the next step holds besides the drafts of these."""
        rows = self.admission.pending_prefill_rows()
        return Load(
            prefill_rows=min(rows, self.config.engine.max_step_rows - len(decoding)),
            context_tokens=sum(len(s.token_ids) for s in decoding),
        )

    def forward(self, packed: VerifyBatch) -> tuple[VerifyBatch, Forwarded]:
        """The target's pass over a packed batch → the batch on the device, and what the target said."""
        taps = self.drafter.taps if self.drafter else ()
        if self.graphs is not None and self.graphs.takes(packed):
            batch, output = self.graphs.run(packed, taps)
            return batch, Forwarded(output, self.target.logits(output.hidden[batch.logit_rows]))
        batch = packed.to(self.target.device)
        output = self.target.forward(
            batch.token_ids,
            batch.positions,
            self.kv,
            batch.slots,
            batch.paged,
            taps,
            self.adapters.rows(batch.work),
            batch.logit_rows,
        )
        assert output.logits is not None
        return batch, Forwarded(output, output.logits)

    def _accept(self, batch: VerifyBatch, forwarded: Forwarded) -> list[Verdict | None]:
        """A verdict per work item; None for a prefill chunk that emits nothing yet."""
        requests, row = [], 0
        for item in batch.work:
            if not item.needs_logits:
                continue
            draft = item.sequence.draft
            tokens = item.draft_tokens
            requests.append(
                VerifyRequest(
                    first_row=row,
                    draft_tokens=tokens,
                    draft_probs=draft.draft_probs if tokens and draft else None,
                    sampling=item.sequence.request.sampling,
                    rng=item.sequence.rng,
                    adjuster=item.sequence.adjuster,
                    noise_keys=item.sequence.noise_keys(len(tokens) + 1),
                )
            )
            row += len(tokens) + 1
        vocab_map = self.drafter.vocab_map if self.drafter else None
        found = iter(self.acceptor(forwarded.logits, requests, vocab_map))
        return [next(found) if item.needs_logits else None for item in batch.work]

    def _commit(
        self, batch: VerifyBatch, forwarded: Forwarded, verdicts: Seq[Verdict | None]
    ) -> list[RequestOutput]:
        """Emits tokens, ends requests, keeps the drafter's context and the prefix cache up to date."""
        outputs: list[RequestOutput] = []
        outcomes: list[Outcome] = []
        kept_rows: list[np.ndarray] = []
        first_row = first_logits = 0
        next_tokens: list[int] = []
        for item, verdict in zip(batch.work, verdicts, strict=True):
            sequence, draft_tokens = item.sequence, item.draft_tokens
            if sequence.num_prompt_logprobs_missing:
                self._note_prompt_logprobs(item, forwarded.output.hidden[first_row:])
            accepted = verdict.num_accepted if verdict else 0
            # Rows of rejected tokens stay out of the context; their KV is overwritten by later rows.
            committed = 1 + accepted if item.decoding else item.num_rows
            kept_rows.append(np.arange(first_row, first_row + committed))
            first_row += item.num_rows
            first = sequence.num_computed
            num_logits = len(draft_tokens) + 1 if verdict is not None else 0
            logits = forwarded.logits[first_logits : first_logits + num_logits]
            output, outcome = self.settle(item, verdict, logits, in_full=self.budget.verified_in_full)
            outputs += [] if output is None else [output]
            outcomes += [] if outcome is None else [outcome]
            next_tokens += _tokens_after(sequence.token_ids, first, committed)
            first_logits += num_logits
        if self.drafter is not None:
            self.drafter.commit(self._context_rows(batch, forwarded.output.taps, kept_rows, next_tokens))
            self.learn(outcomes)
        self.counters.target_steps += 1
        return outputs

    def learn(self, outcomes: Seq[Outcome]) -> None:
        """From what became of a step's drafts."""
        assert self.drafter is not None
        self.drafter.observe(outcomes)
        claimed, self._claimed_tokens = self._claimed_tokens, 0.0
        self.budget.note_outcomes(claimed, sum(outcome.num_accepted for outcome in outcomes))

    def _context_rows(
        self, batch: VerifyBatch, taps: Tensor, kept_rows: Seq[np.ndarray], next_tokens: Seq[int]
    ) -> ContextRows:
        """Of the rows that stand. kept_rows: each request's, as indices of the batch's rows"""
        device = self.target.device
        following = to_device(torch.tensor(next_tokens), device)
        # All of them, if nothing was rejected; but the tensors of captured steps are the next step's, too.
        if self.graphs is None and len(next_tokens) == len(batch.slots):
            return ContextRows(taps, batch.positions, batch.slots, following)
        rows = to_device(torch.from_numpy(np.concatenate(kept_rows)), device)
        return ContextRows(taps[rows], batch.positions[rows], batch.slots[rows], following)

    def settle(
        self, item: Work, verdict: Verdict | None, logits: Tensor | None, *, in_full: bool
    ) -> tuple[RequestOutput | None, Outcome | None]:
        """What a step meant for one request: its tokens, its end, its counts. logits [ℓ + 1, V] of its rows,
        None where nobody wants log-probabilities; `in_full`: whole drafts were verified."""
        sequence, draft_tokens = item.sequence, item.draft_tokens
        accepted = verdict.num_accepted if verdict else 0
        first, outcome = sequence.num_computed, None
        sequence.num_computed += 1 + accepted if item.decoding else item.num_rows
        details = _details(item, accepted) if sequence.request.speculation_details else None
        emitted: list[int] = []
        if verdict is not None:
            emitted = self._emit(sequence, [*draft_tokens[:accepted], verdict.next_token])
        if item.decoding:
            outcome = self._outcome(item, accepted, len(emitted), in_full=in_full)
            if self.draft_log is not None and sequence.draft is not None:
                self.draft_log.note(sequence, outcome.num_verified, accepted, len(emitted))
            if self.recorder is not None:
                self.recorder.verified(sequence, outcome.num_verified, accepted, len(emitted))
            verified = outcome.num_verified
            expected = float(sequence.draft.survival[:verified].sum()) if sequence.draft else 0.0
            self.counters.expected_tokens += expected
            self._claimed_tokens += expected
            if self.context_watch is not None:
                self.context_watch.note(first + 1, verified, outcome.num_accepted, expected)
            self._count_decode(sequence, outcome, len(emitted))
        self._register_prefix(sequence)
        if not emitted:
            return None, outcome
        self.counters.emitted_tokens += len(emitted)
        return self._output(sequence, emitted, logits, details), outcome

    def _outcome(self, item: Work, num_accepted: int, num_emitted: int, *, in_full: bool) -> Outcome:
        verified, draft = len(item.draft_tokens), item.sequence.draft
        return Outcome(
            num_verified=verified,
            num_accepted=min(num_accepted, num_emitted),
            num_known=verified if num_emitted > num_accepted else num_emitted,
            in_full=in_full,
            note=None if draft is None else draft.note,
        )

    def _emit(self, sequence: Sequence, tokens: Seq[int]) -> list[int]:
        """Appends tokens in order until one of them ends the request; the ones that count."""
        sampling = sequence.request.sampling
        emitted: list[int] = []
        for token in tokens:
            sequence.token_ids.append(token)
            emitted.append(token)
            ends = token in self._eos and not sampling.ignore_eos
            if ends or token in sampling.stop_token_ids:
                sequence.finish_reason = FinishReason.STOP
            elif sequence.remaining_tokens <= 0:
                sequence.finish_reason = FinishReason.LENGTH
            if sequence.finish_reason is not None:
                break
        if sequence.adjuster is not None:
            sequence.adjuster.commit(emitted)
        return emitted

    def _count_decode(self, sequence: Sequence, outcome: Outcome, num_emitted: int) -> None:
        counters = self.counters
        counters.request_steps += 1
        counters.decode_tokens += num_emitted
        counters.verified_tokens += outcome.num_verified
        counters.accepted_tokens += outcome.num_accepted
        counters.rejected_tokens += outcome.num_verified - outcome.num_accepted
        for position in range(outcome.num_verified):
            counters.verified_per_position[position] += 1
            counters.accepted_per_position[position] += position < outcome.num_accepted
        sequence.num_verified += outcome.num_verified
        sequence.num_accepted += outcome.num_accepted
        if sequence.draft is not None:
            counters.trimmed_tokens += len(sequence.draft.token_ids) - outcome.num_verified
            sequence.draft = None

    def _forget_draft(self, sequence: Sequence) -> None:
        """A draft that will never be verified (abort, preemption) counts as trimmed."""
        if sequence.draft is not None:
            self.counters.trimmed_tokens += len(sequence.draft.token_ids)
            sequence.draft = None

    def forget_drafts(self) -> list[Sequence]:
        """Drops every unverified draft; the requests that run."""
        if self.ahead is not None:
            self._held += self.ahead.finish()
        for sequence in self.admission.running:
            self._forget_draft(sequence)
        return self.admission.running

    def _register_prefix(self, sequence: Sequence) -> None:
        sequence.num_registered, sequence.prefix_identity = self.pool.register(
            sequence.blocks,
            sequence.token_ids[: sequence.num_computed],
            sequence.num_registered,
            sequence.prefix_identity,
            sequence.context_from,
        )

    def _note_prompt_logprobs(self, item: Work, hidden: Tensor) -> None:
        """What a chunk says of the prompt tokens after its rows. hidden [≥ num_rows, H], its own first"""
        sequence = item.sequence
        known, computed = len(sequence.prompt_logprobs), sequence.num_computed
        end = min(computed + item.num_rows, sequence.num_prompt - 1)  # rows that a prompt token follows
        if computed <= known < end:  # after a preemption, rows come again
            sequence.prompt_logprobs += prompt_logprobs(
                hidden[known - computed : end - computed],
                self.target.logits,
                sequence.token_ids[known + 1 : end + 1],
                sequence.request.sampling.prompt_logprobs or 0,
            )

    def _output(
        self, sequence: Sequence, emitted: list[int], logits: Tensor | None, details: StepDetails | None
    ) -> RequestOutput:
        """The step's output; a finished request leaves the engine here. logits [≥ len(emitted), V]"""
        if self.recorder is not None:
            self.recorder.emitted(sequence)
        request, num_top = sequence.request, sequence.request.sampling.logprobs
        is_first = sequence.num_output == len(emitted)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if num_top is not None:
            assert logits is not None
            logprobs = tuple(token_logprobs(logits[: len(emitted)], emitted, num_top))
        output = RequestOutput(
            request.request_id,
            tuple(emitted),
            logprobs=logprobs,
            prompt_logprobs=tuple(sequence.prompt_logprobs) if is_first else (),
            details=details,
        )
        if sequence.finish_reason is None:
            return output
        del self._sequences[request.request_id]
        self._drop(sequence)
        self._num_finished += 1
        return replace(output, finish_reason=sequence.finish_reason, usage=sequence.usage())

    def _draft(self) -> int:
        """One block for each request worth drafting; how many were."""
        if self.drafter is None:
            return 0
        decoding = self.admission.decoding()
        chosen = self.budget.wants_draft(decoding, self.load(decoding))
        chosen = [sequence for sequence in chosen if self.context_cap(sequence) > 0]
        if not chosen:
            return 0
        width, started_ms = self.budget.draft_tokens(), self.now_ms()
        block = self.drafter.propose(
            [
                DraftRequest(
                    s.token_ids,
                    s.blocks,
                    s.request.sampling,
                    s.rng.random(width),
                    s.adjuster,
                    s.noise_keys(width),
                    s.arrival,
                    s.context_from,
                )
                for s in chosen
            ]
        )
        self.keep_drafts(chosen, block, width, self.now_ms() - started_ms)
        return len(chosen)

    def keep_drafts(self, sequences: Seq[Sequence], block: DraftBlock, width: int, took_ms: float) -> None:
        """A block's proposals of `width` tokens, until they are verified."""
        scores = np.zeros((len(sequences), self.counters.block_size), dtype=np.float32)
        scores[:, :width] = survival(block.confidences)
        self.budget.note_draft(scores, took_ms, width)
        for row, sequence in enumerate(sequences):
            self._keep_draft(sequence, block, row, scores[row])

    def _keep_draft(self, sequence: Sequence, block: DraftBlock, row: int, scores: FloatArray) -> None:
        sequence.remember(scores)
        if tokens := block.token_ids[row]:
            logits = None if block.confidence_logits is None else block.confidence_logits[row]
            note = None if block.notes is None else block.notes[row]
            sequence.draft = Draft(tokens, scores, block.draft_probs[row], logits, note)
            sequence.num_drafted += len(tokens)
            self.counters.drafts += 1
            self.counters.drafted_tokens += len(tokens)

    def note_step(
        self,
        work: Seq[Work],
        rows: int,
        context_tokens: int,
        num_drafted: int,
        width: int,
        measured_ms: float,
    ) -> None:
        """Measured against predicted step time: corrects the table, feeds the metrics. `width` tokens were
        drafted for `num_drafted` requests."""
        decoding = sum(w.decoding for w in work)
        decode_rows = sum(w.num_rows for w in work if w.decoding)
        verified = decode_rows - decoding
        draft_ms = self.budget.drafting_took_ms
        size = StepSize(decode_rows, verified, rows - decode_rows, context_tokens)
        predicted_ms = self.budget.note_step(size, num_drafted, measured_ms, width)
        record = StepRecord(
            ended_ms=self._clock.now_ms(),
            measured_ms=measured_ms,
            predicted_ms=predicted_ms,
            budget_tokens=verified,
            rows=rows,
            num_decoding=decoding,
        )
        self._recent.add(record)
        if self.context_watch is not None:
            self.context_watch.end_step(*self.budget.speculation_ms(size, num_drafted, width))
        if self.recorder is not None:
            self.recorder.step(record, num_drafted, width, draft_ms, context_tokens)
        self._coupling.base_rows = decoding

    def now_ms(self) -> float:
        """On the engine's clock."""
        return self._clock.now_ms()

    # -- what others see ---------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A snapshot; safe to call from another thread (counters are copied)."""
        recent = self._recent.summary()
        return EngineStats(
            engine_id=self.engine_id,
            counters=replace(
                self.counters,
                verified_per_position=list(self.counters.verified_per_position),
                accepted_per_position=list(self.counters.accepted_per_position),
            ),
            num_running=len(self.admission.running),
            num_waiting=len(self.admission.waiting),
            kv_used_blocks=self.pool.num_used,
            kv_total_blocks=self.pool.num_blocks,
            prefix_hit_tokens=self.admission.hit_tokens,
            prefix_query_tokens=self.admission.query_tokens,
            num_preemptions=self.admission.num_preemptions,
            num_finished=self._num_finished,
            num_aborted=self._num_aborted,
            num_refused=self.admission.waiting.num_refused,
            budget_tokens=recent.budget_tokens,
            step_predicted_ms=recent.predicted_ms,
            step_measured_ms=recent.measured_ms,
            plan_age_ms=self._coupling.plan_age_ms(),
            max_running=self.admission.max_running,
            kv_block_size=self.pool.block_size,
            rates=self.budget.rates(self.admission.max_running),
            prefill_ms_per_token=self.budget.prefill_ms_per_token(),
            context_bands=() if self.context_watch is None else self.context_watch.bands(),
        )

    def recent_steps(self) -> list[StepRecord]:
        """The steps of the last second, oldest first."""
        return self._recent.steps()

    def apply_plan(self, plan: StepPlan) -> None:
        """Couples this engine to the others until the plan expires."""
        self._coupling.apply(plan)

    def make_report(
        self, replica_id: str, generation: int, sequence: int, include_table: bool
    ) -> SurvivalReport:
        """What the scheduler actor needs to know. Called on the step thread or between steps."""
        table = self.budget.table
        scored = [s for s in self.admission.decoding() if s.stale_survival() is not None]
        known = [row for s in scored if (row := s.stale_survival()) is not None]
        gamma = self.counters.block_size
        return SurvivalReport(
            replica_id=replica_id,
            generation=generation,
            sequence=sequence,
            survival=np.stack(known) if known else np.zeros((0, gamma), dtype=np.float32),
            base_rows=self._coupling.base_rows,
            num_running=len(self.admission.running),
            num_waiting=len(self.admission.waiting),
            table_digest=table.digest if table else "",
            table=table.to_dict() if table and include_table else None,
            budget_tokens=self._recent.summary().budget_tokens,
            claims=row_claims(scored),
        )

    def describe(self) -> dict[str, Any]:
        """What was loaded, in words, for the start-up log."""
        c = self.target.config
        kv_tokens = self.pool.num_blocks * self.pool.block_size
        return {
            "target": f"{self.config.model.id}: {c.model_type}, {c.num_layers} layers, "
            f"hidden {c.hidden_size}, {self.config.model.dtype}",
            "drafter": self.drafter.describe() if self.drafter else "none",
            "mode": self.config.speculation.mode.value,
            "step_table": self.budget.table.summary()
            if self.budget.table
            else "none: everything is verified",
            "kv": f"{self.pool.num_blocks} blocks of {self.pool.block_size} tokens ({kv_tokens} tokens, "
            f"{self.kv.num_bytes / 2**20:.0f} MiB)",
        }


def _details(item: Work, accepted: int) -> StepDetails:
    """For a request that wants to know how its tokens came about."""
    draft, verified = item.sequence.draft, len(item.draft_tokens)
    if draft is None:
        return StepDetails(0, 0, 0)
    survival = tuple(round(float(score), 4) for score in draft.survival[:verified])
    return StepDetails(len(draft.token_ids), verified, accepted, survival)


def _tokens_after(token_ids: list[int], first: int, count: int) -> list[int]:
    """The token after each of `count` rows from `first` on. A request that ended early has no more of them:
    its last one stands in, for rows that no draft will start from."""
    after = token_ids[first + 1 : first + 1 + count]
    return after + [token_ids[-1]] * (count - len(after))
