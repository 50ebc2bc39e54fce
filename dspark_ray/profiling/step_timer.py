"""Runs real target steps and drafts of chosen sizes on an idle engine, on made-up requests.

The same path as `Engine.step`: pack, target forward, logits, accept; and for the drafter its context rows and
a block for each request. What is left out is bookkeeping of microseconds. The KV cache is not prepared:
attention takes the same time over any content.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from dspark_ray.core.clock import Clock
from dspark_ray.core.types import Request, SamplingParams
from dspark_ray.engine.acceptance import VerifyRequest
from dspark_ray.engine.batch import Work, pack
from dspark_ray.engine.engine import Engine
from dspark_ray.engine.sequence import Draft, Sequence, new_sequence
from dspark_ray.models.drafters.base import ContextRows, DraftRequest

ROWS_PER_REQUEST = 4  # of a measured step: an anchor and half a block, where there are enough requests
COMMITTED_ROWS = 2  # of a request in a measured draft: an anchor and an accepted token
_GREEDY = SamplingParams(temperature=0.0, max_tokens=1 << 20)


@dataclass(frozen=True, slots=True)
class TargetStep:
    """A step to be measured, and what it asks of the target."""

    work: tuple[Work, ...]
    num_rows: int
    context_tokens: int  # Σ cached keys that decoding requests attend to, as `VerifyBatch` counts them


class StepTimer:
    """Owns all free blocks of its engine while it lives; `close()` gives them back."""

    def __init__(self, engine: Engine, clock: Clock, *, seed: int = 0) -> None:
        assert not engine.has_work(), "the engine is serving; its steps would be measured with it"
        self.engine = engine
        self._clock = clock
        self._rng = np.random.default_rng(seed)
        self.num_draft_tokens = engine.config.speculation.num_draft_tokens
        self._block_size = engine.pool.block_size
        self._blocks = engine.pool.take(engine.pool.num_free) or []

    def close(self) -> None:
        self.engine.pool.release(self._blocks)
        self._blocks = []

    @property
    def max_context(self) -> int:
        """Longest context one request can have here."""
        limit = min(self.engine.config.model.max_model_len, len(self._blocks) * self._block_size)
        return max(1, limit - self.num_draft_tokens - 1)

    def target_step(self, num_rows: int, context: int, num_requests: int | None = None) -> TargetStep:
        """A step of `num_rows`: requests with drafts first; what they cannot hold is a prefill chunk."""
        engine = self.engine.config.engine
        wanted = num_requests or -(-num_rows // ROWS_PER_REQUEST)
        count = min(wanted, engine.max_running, num_rows)
        decoding_rows = min(num_rows, count * (1 + self.num_draft_tokens))
        sizes = [decoding_rows // count + (i < decoding_rows % count) for i in range(count)]
        sequences = self._sequences(count, context)
        work = [Work(s, rows, decoding=True) for s, rows in zip(sequences, sizes, strict=True)]
        if num_rows > decoding_rows:
            work.append(self._prefill(num_rows - decoding_rows))
        context_tokens = sum(w.sequence.num_computed + w.num_rows for w in work if w.decoding)
        return TargetStep(tuple(work), num_rows, context_tokens)

    def prompt_step(self, num_rows: int, prompt_tokens: int) -> TargetStep:
        """A step of the beginnings of longer prompts, `prompt_tokens` of each: it decides nothing."""
        longest = max(1, min(prompt_tokens, self.max_context))
        whole, rest = divmod(num_rows, longest)
        sizes = [longest] * whole + [rest] * (rest > 0)
        return TargetStep(tuple(self._prefill(size) for size in sizes), num_rows, 0)

    @torch.inference_mode()
    def verify_ms(self, step: TargetStep) -> float:
        """Runs the step once."""
        engine = self.engine
        started_ms = self._clock.now_ms()
        _, forwarded = engine.forward(pack(step.work, self._block_size))
        requests, row = [], 0
        for item in step.work:
            if item.needs_logits:
                requests.append(VerifyRequest(row, item.draft_tokens, None, _GREEDY, item.sequence.rng))
                row += len(item.draft_tokens) + 1
        engine.acceptor(forwarded.logits, requests, None)
        return self._clock.now_ms() - started_ms

    @torch.inference_mode()
    def draft_ms(self, num_requests: int, context: int, num_tokens: int | None = None) -> float:
        """Stores the context of a step's committed rows and drafts for each request, once: whole blocks, or
        their first `num_tokens`."""
        drafter = self.engine.drafter
        assert drafter is not None, "there is no drafter to measure"
        sequences = self._sequences(num_requests, context)
        rows = self._context_rows(sequences)
        requests = [
            DraftRequest(
                s.token_ids, s.blocks, _GREEDY, self._rng.random(num_tokens or self.num_draft_tokens)
            )
            for s in sequences
        ]
        started_ms = self._clock.now_ms()
        drafter.commit(rows)
        drafter.propose(requests)
        return self._clock.now_ms() - started_ms

    def _context_rows(self, sequences: Seq[Sequence]) -> ContextRows:
        drafter, target = self.engine.drafter, self.engine.target
        assert drafter is not None
        first = [max(0, len(s.token_ids) - COMMITTED_ROWS) for s in sequences]
        where = [np.arange(start, len(s.token_ids)) for start, s in zip(first, sequences, strict=True)]
        slots = [
            np.asarray(s.blocks)[w // self._block_size] * self._block_size + w % self._block_size
            for s, w in zip(sequences, where, strict=True)
        ]
        positions = torch.from_numpy(np.concatenate(where)).to(target.device)
        width = len(drafter.taps) * target.config.hidden_size
        taps = torch.zeros(len(positions), width, dtype=target.dtype, device=target.device)
        next_tokens = torch.zeros_like(positions)
        return ContextRows(
            taps, positions, torch.from_numpy(np.concatenate(slots)).to(target.device), next_tokens
        )

    def _sequences(self, count: int, context: int) -> list[Sequence]:
        """Decoding requests with `context` cached tokens, an anchor and a draft each."""
        context = min(context, self.max_context)
        per_request = self.engine.pool.blocks_for(context + 1 + self.num_draft_tokens)
        vocab = self.engine.target.config.vocab_size
        sequences = []
        for index in range(count):
            tokens = self._rng.integers(vocab, size=context + 1 + self.num_draft_tokens).tolist()
            sequence = new_sequence(Request(f"profile-{index}", tuple(tokens[:context]), _GREEDY), index)
            sequence.token_ids.append(tokens[context])
            sequence.num_computed = context
            sequence.draft = Draft(
                tokens[context + 1 :], np.zeros(self.num_draft_tokens, dtype=np.float32), None
            )
            # A pool too small for all of them lets some share: their keys are only read for their time.
            start = index * per_request
            places = np.arange(start, start + per_request) % len(self._blocks)
            sequence.blocks = [self._blocks[place] for place in places]
            sequences.append(sequence)
        return sequences

    def _prefill(self, num_rows: int) -> Work:
        """A chunk at the beginning of a longer prompt."""
        num_blocks = self.engine.pool.blocks_for(num_rows)
        vocab = self.engine.target.config.vocab_size
        prompt = tuple(self._rng.integers(vocab, size=num_rows + 1).tolist())
        sequence = new_sequence(Request("profile-prefill", prompt, _GREEDY), 0)
        sequence.blocks = [self._blocks[place % len(self._blocks)] for place in range(num_blocks)]
        return Work(sequence, num_rows, decoding=False)
