"""Who runs in the next step: the waiting queue, blocks for every row, preemption when they run out."""

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq

from dspark_ray.core.clock import Clock
from dspark_ray.core.errors import RequestError
from dspark_ray.core.types import Request
from dspark_ray.engine.batch import Work
from dspark_ray.engine.block_pool import BlockPool
from dspark_ray.engine.sequence import Sequence, new_sequence
from dspark_ray.engine.waiting_queue import WaitingQueue
from dspark_ray.models.adjust import AdjusterFactory, make_adjuster


class Admission:
    """Clients in turn within a level of priority (`Sequence.turn`). Decoding requests go first; prefill fills
    the rows that are left.
    """

    def __init__(
        self,
        pool: BlockPool,
        forget_draft: Callable[[Sequence], None],
        *,
        max_running: int,
        max_step_rows: int,
        max_waiting: int,
        max_model_len: int,
        clock: Clock,
        adjusters: Seq[AdjusterFactory] = (),
    ) -> None:
        """`forget_draft` is called for a request that loses its draft unverified, so that it is counted."""
        self.pool = pool
        self._forget_draft = forget_draft
        self.max_running = max_running
        self.max_step_rows = max_step_rows
        self.max_model_len = max_model_len
        self._adjusters = tuple(adjusters)
        self.waiting = WaitingQueue(max_waiting, clock)
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.hit_tokens = 0
        self.query_tokens = 0
        self._arrivals = 0

    def add(self, request: Request) -> Sequence:
        """Queues a request; refuses what can never run, and what the queue has no room or time for."""
        length = len(request.prompt_token_ids) + request.sampling.max_tokens
        if not request.prompt_token_ids:
            raise RequestError("the prompt is empty", param="prompt")
        if len(request.emitted_token_ids) >= request.sampling.max_tokens:
            raise RequestError("max_tokens leaves nothing to generate", param="max_tokens")
        if length > self.max_model_len:
            raise RequestError(
                f"the prompt has {len(request.prompt_token_ids)} tokens and max_tokens is "
                f"{request.sampling.max_tokens}; together they exceed the model's {self.max_model_len}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if self.pool.blocks_for(length) > self.pool.num_blocks:
            raise RequestError(
                f"{length} tokens need {self.pool.blocks_for(length)} KV blocks; "
                f"this engine has {self.pool.num_blocks}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        adjuster = make_adjuster(request, self._adjusters)
        sequence = new_sequence(request, self._arrivals, adjuster)
        if request.adapter is not None:
            sequence.prefix_root = self.pool.root(request.adapter.digest)
        self._arrivals += 1
        self.waiting.add(sequence)
        return sequence

    def pending_prefill_rows(self) -> int:
        """Rows of prompt that the next step will take: of requests that run, and of those that can start."""
        tokens = sum(len(s.token_ids) - s.num_computed for s in self.running if not s.is_decoding)
        free_blocks = self.pool.num_free
        for sequence in itertools.islice(self.waiting, self.max_running - len(self.running)):
            free_blocks -= self.pool.blocks_for(len(sequence.token_ids))
            if free_blocks < 0 or tokens >= self.max_step_rows:
                break
            tokens += len(sequence.token_ids)
        return min(tokens, self.max_step_rows)

    def decoding(self) -> list[Sequence]:
        """Requests that emit in the next step, one row each at least."""
        return [s for s in self.running if s.is_decoding]

    def make_room(self) -> list[Sequence]:
        """Blocks for every decoding request's anchor, preempting the last in turn if need be; then, from
        what is free only, for its draft. → the decoding requests that still run.

        NOTE: before any length is chosen. Lengths depend on scores that have seen drafted tokens: if they
        decided who gets the last block, whether a token is verified would depend on its value.
        """
        for sequence in self.decoding():
            if sequence in self.running:
                self._grow(sequence, len(sequence.token_ids))
        kept = self.decoding()
        for sequence in kept:
            drafted = len(sequence.draft.token_ids) if sequence.draft else 0
            missing = self.pool.blocks_for(len(sequence.token_ids) + drafted) - len(sequence.blocks)
            sequence.blocks += self.pool.take(min(max(missing, 0), self.pool.num_free)) or []
        return kept

    def make_room_ahead(self, wanted: Seq[tuple[Sequence, int, int]]) -> bool:
        """As `make_room`, before it is known where the requests stand: blocks for so many tokens of each,
        then, from what is left, for so many drafted ones. False where they run out before any is drafted:
        someone has to be preempted.
        """
        for sequence, num_tokens, _ in wanted:
            missing = self.pool.blocks_for(num_tokens) - len(sequence.blocks)
            if missing > 0:
                taken = self.pool.take(missing)
                if taken is None:
                    return False
                sequence.blocks += taken
        for sequence, num_tokens, num_drafted in wanted:
            missing = self.pool.blocks_for(num_tokens + num_drafted) - len(sequence.blocks)
            sequence.blocks += self.pool.take(min(max(missing, 0), self.pool.num_free)) or []
        return True

    def draft_room(self, sequence: Sequence) -> int:
        """Draft tokens that the blocks it owns have room for."""
        return len(sequence.blocks) * self.pool.block_size - len(sequence.token_ids)

    def fill(self, decoding: list[Sequence], lens: list[int]) -> list[Work]:
        """The step's work: decoding requests with their lengths, then prefill in the rows that are left."""
        work = [Work(s, 1 + length, decoding=True) for s, length in zip(decoding, lens, strict=True)]
        rows_left = self.max_step_rows - sum(w.num_rows for w in work)
        return work + self.fill_prompts([s for s in self.running if not s.is_decoding], rows_left)

    def fill_prompts(
        self, running: Seq[Sequence], rows_left: int, may_start: Callable[[Sequence], bool] = lambda _: True
    ) -> list[Work]:
        """Chunks of `running` prompts, then of waiting ones, up to the first that may not start."""
        work: list[Work] = []
        for sequence in running:
            rows_left -= _add_chunk(sequence, rows_left, work)
        while rows_left > 0 and (first := self.next_to_start()) is not None:
            if not may_start(first) or not self._start(first):
                break
            rows_left -= _add_chunk(first, rows_left, work)
        return work

    def next_to_start(self) -> Sequence | None:
        """Who starts next, blocks permitting; None: nobody waits, or no place is free."""
        return self.waiting.first if self.waiting and len(self.running) < self.max_running else None

    def drop(self, sequence: Sequence) -> None:
        """Takes a request out wherever it is and frees all it holds."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._free(sequence)

    def _start(self, sequence: Sequence) -> bool:
        """Moves the first waiting request to running if its prompt fits without preempting anyone."""
        # A cached prefix has no logits: who wants its log-probabilities computes it again.
        searched = [] if sequence.num_prompt_logprobs_missing else sequence.token_ids
        matched = self.pool.match_prefix(searched, sequence.prefix_root)
        extra = self.pool.blocks_for(len(sequence.token_ids)) - len(matched)
        taken = self.pool.take(extra)
        if taken is None:
            self.pool.release(matched)
            return False
        self.waiting.start_first()
        self.running.append(sequence)
        sequence.blocks = matched + taken
        sequence.num_registered = len(matched)
        sequence.prefix_identity = self.pool.identity_of(matched, sequence.prefix_root)
        sequence.num_computed = len(matched) * self.pool.block_size
        sequence.context_from = self.pool.context_from(matched)
        if sequence.num_output == len(
            sequence.request.emitted_token_ids
        ):  # not a resumption after preemption
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
            self.hit_tokens += sequence.num_computed
            self.query_tokens += len(sequence.token_ids)
        return True

    def _grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Blocks up to `num_tokens`, at the expense of those last in turn, its own at last."""
        missing = self.pool.blocks_for(num_tokens) - len(sequence.blocks)
        while missing > 0:
            taken = self.pool.take(missing)
            if taken is not None:
                sequence.blocks += taken
                return
            victim = max(self.running, key=lambda s: s.turn)
            self._preempt(victim)
            if victim is sequence:
                return

    def _preempt(self, sequence: Sequence) -> None:
        """Back to its place in the queue; its KV is recomputed (or found in the prefix cache) later."""
        self.running.remove(sequence)
        self._free(sequence)
        sequence.survival_history.clear()
        sequence.zero_budget_steps = sequence.steps_since_draft = 0
        self.waiting.put_back(sequence)
        self.num_preemptions += 1

    def _free(self, sequence: Sequence) -> None:
        self._forget_draft(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = sequence.num_registered = sequence.prefix_identity = 0


def _add_chunk(sequence: Sequence, rows_left: int, work: list[Work]) -> int:
    """The next rows of a prompt, as many as fit; how many that is."""
    rows = min(rows_left, len(sequence.token_ids) - sequence.num_computed)
    if rows > 0:
        work.append(Work(sequence, rows, decoding=False))
    return max(rows, 0)
