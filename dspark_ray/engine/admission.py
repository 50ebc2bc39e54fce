"""Who runs in the next step: the waiting queue, blocks for every row, preemption when they run out."""

from collections import deque
from collections.abc import Callable

from dspark_ray.core.errors import QueueFullError, RequestError
from dspark_ray.core.types import Request
from dspark_ray.engine.batch import Work
from dspark_ray.engine.block_pool import BlockPool
from dspark_ray.engine.sequence import Sequence, new_sequence


class Admission:
    """First come, first served. Decoding requests go first; prefill fills the rows that are left."""

    def __init__(
        self,
        pool: BlockPool,
        forget_draft: Callable[[Sequence], None],
        *,
        max_running: int,
        max_step_rows: int,
        max_waiting: int,
        max_model_len: int,
    ) -> None:
        """`forget_draft` is called for a request that loses its draft unverified, so that it is counted."""
        self.pool = pool
        self._forget_draft = forget_draft
        self.max_running = max_running
        self.max_step_rows = max_step_rows
        self.max_waiting = max_waiting
        self.max_model_len = max_model_len
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.hit_tokens = 0
        self.query_tokens = 0
        self._arrivals = 0

    def add(self, request: Request) -> None:
        """Queues a request; refuses what can never run and what exceeds the queue."""
        length = len(request.prompt_token_ids) + request.sampling.max_tokens
        if not request.prompt_token_ids:
            raise RequestError("the prompt is empty", param="prompt")
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
        if len(self.waiting) >= self.max_waiting:
            raise QueueFullError(f"{len(self.waiting)} requests are waiting already")
        self.waiting.append(new_sequence(request, self._arrivals))
        self._arrivals += 1

    def decoding(self) -> list[Sequence]:
        """Requests that emit in the next step, one row each at least."""
        return [s for s in self.running if s.is_decoding]

    def pending_prefill_rows(self) -> int:
        """Rows of prompt that the next step could take, as far as they fit."""
        tokens = sum(len(s.token_ids) - s.num_computed for s in self.running if not s.is_decoding)
        for sequence in self.waiting:
            if tokens >= self.max_step_rows:
                break
            tokens += len(sequence.token_ids)
        return min(tokens, self.max_step_rows)

    def reserve(self, decoding: list[Sequence], lens: list[int]) -> list[Work]:
        """Blocks for the rows of this step; may preempt the latest arrivals. The work, decoding first."""
        work = [
            Work(s, 1 + length, decoding=True)
            for s, length in zip(decoding, lens, strict=True)
            if s in self.running and self._grow(s, len(s.token_ids) + length)
        ]
        # A later request may have lost its blocks to an earlier one after its turn.
        work = [w for w in work if w.sequence in self.running]
        rows_left = self.max_step_rows - sum(w.num_rows for w in work)
        for sequence in [s for s in self.running if not s.is_decoding]:
            rows_left -= self._add_chunk(sequence, rows_left, work)
        while rows_left > 0 and self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            if not self._start(sequence):
                break
            rows_left -= self._add_chunk(sequence, rows_left, work)
        return work

    def drop(self, sequence: Sequence) -> None:
        """Takes a request out wherever it is and frees all it holds."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._free(sequence)

    def _start(self, sequence: Sequence) -> bool:
        """Moves the first waiting request to running if its prompt fits without preempting anyone."""
        matched = self.pool.match_prefix(sequence.token_ids)
        extra = self.pool.blocks_for(len(sequence.token_ids)) - len(matched)
        taken = self.pool.take(extra)
        if taken is None:
            self.pool.release(matched)
            return False
        self.waiting.popleft()
        self.running.append(sequence)
        sequence.blocks = matched + taken
        sequence.num_registered = len(matched)
        sequence.prefix_identity = self.pool.identity_of(matched)
        sequence.num_computed = len(matched) * self.pool.block_size
        if sequence.num_output == len(
            sequence.request.emitted_token_ids
        ):  # not a resumption after preemption
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
            self.hit_tokens += sequence.num_computed
            self.query_tokens += len(sequence.token_ids)
        return True

    def _add_chunk(self, sequence: Sequence, rows_left: int, work: list[Work]) -> int:
        rows = min(rows_left, len(sequence.token_ids) - sequence.num_computed)
        if rows <= 0 or sequence not in self.running:
            return 0
        work.append(Work(sequence, rows, decoding=False))
        return rows

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks up to `num_tokens`, at others' expense if need be; False if it was itself preempted."""
        missing = self.pool.blocks_for(num_tokens) - len(sequence.blocks)
        while missing > 0:
            taken = self.pool.take(missing)
            if taken is not None:
                sequence.blocks += taken
                break
            victim = max(self.running, key=lambda s: s.arrival)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue; its KV is recomputed (or found in the prefix cache) later."""
        self.running.remove(sequence)
        self._free(sequence)
        sequence.survival_history.clear()
        sequence.zero_budget_steps = sequence.steps_since_draft = 0
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _free(self, sequence: Sequence) -> None:
        self._forget_draft(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = sequence.num_registered = sequence.prefix_identity = 0
