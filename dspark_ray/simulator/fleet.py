"""All replicas side by side in arrays: queues, admission, prefill, KV memory, preemption, decoding.

A *sweep* runs one event of every replica that is behind: one step with prefill, or a *stride* of decoding
steps up to the next thing that changes its load (a request that can start, or the end of the window). Every
step of every replica is counted; what a stride leaves out is that a slot freed inside it is filled at its
end. With `max_stride` 1 each step is an event of its own. Replicas meet only in the router and in plans.
"""

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from dspark_ray.core.types import IntArray
from dspark_ray.simulator.law import Floats, Law, Next, Steps
from dspark_ray.simulator.routing import FleetLoad
from dspark_ray.simulator.tally import Tally
from dspark_ray.simulator.workload import Batch

NEVER = np.inf
_PLENTY = 1 << 30


@dataclass(frozen=True, slots=True)
class Limits:
    """Of each replica: the keys of `engine` with these names. All [N]."""

    max_running: IntArray
    max_step_rows: IntArray
    max_waiting: IntArray
    kv_num_blocks: IntArray
    kv_block_size: IntArray


@dataclass(frozen=True, slots=True)
class Finished:
    """Answers that ended in an advance."""

    at_ms: Floats  # [n]


class Fleet:
    """N replicas of S slots, each with a queue of Q places."""

    def __init__(
        self,
        limits: Limits,
        law: Law,
        tally: Tally,
        *,
        max_stride: int = 8,
        max_tokens: IntArray | None = None,
        steps_together: bool = False,
    ) -> None:
        """max_tokens [tasks]: where answers are cut; drafts do not reach past that. Any other end is not
        foreseen. None: they are not cut.
        steps_together: replicas with requests begin their steps together, when the slowest has ended its own.
        """
        assert not steps_together or law.exact, "only single steps can end together"
        self._steps_together = steps_together
        count = len(limits.max_running)
        slots = int(limits.max_running.max())
        places = int(limits.max_waiting.max()) + slots  # every running one may be preempted
        self.limits, self._law, self._tally = limits, law, tally
        self._max_stride = 1 if law.exact else max_stride
        self._max_tokens = np.full(1, _PLENTY) if max_tokens is None else max_tokens
        self.clock_ms = np.zeros(count)
        self.up = np.ones(count, dtype=bool)
        self._live = np.zeros((count, slots), dtype=bool)
        self._arrival_ms = np.zeros((count, slots))
        self._first_ms = np.full((count, slots), np.nan)
        self._prefill = np.zeros((count, slots), dtype=np.int64)  # rows still to come
        self._context = np.zeros((count, slots), dtype=np.int64)  # tokens in the KV cache
        self._left = np.zeros((count, slots), dtype=np.int64)  # output tokens still to come
        self._emitted = np.zeros((count, slots), dtype=np.int64)
        self._order = np.zeros((count, slots), dtype=np.int64)  # of starting: the latest is preempted first
        self._task = np.zeros((count, slots), dtype=np.int64)
        self._started = 0
        self._queue = _Queues(count, places)
        self.last_verified = np.zeros(count)  # draft tokens of the last step
        self.num_emitted = np.zeros(count, dtype=np.int64)  # tokens, of each replica
        self.num_ended = np.zeros(count, dtype=np.int64)  # answers
        self._finished: list[Floats] = []

    # -- what the router and the scheduler see --------------------------------------------------------

    @property
    def num_running(self) -> IntArray:
        """[N]"""
        return np.asarray(self._live.sum(axis=1), dtype=np.int64)

    @property
    def num_waiting(self) -> IntArray:
        """[N]"""
        return self._queue.length.copy()

    def decoding_slots(self, replica: int) -> IntArray:
        return np.flatnonzero(self._live[replica] & (self._prefill[replica] == 0))

    def tasks_of(self, replica: int, slots: IntArray) -> IntArray:
        return np.asarray(self._task[replica, slots])

    def load(self) -> FleetLoad:
        """What a router sees."""
        free = self.limits.kv_num_blocks - self._blocks(slice(None)).sum(axis=1)
        return FleetLoad(self.num_running, self.num_waiting, free * self.limits.kv_block_size)

    # -- what happens to it ------------------------------------------------------------------------------

    def submit(self, batch: Batch, replicas: IntArray) -> None:
        """Requests, each to a replica; a full queue or a prompt that can never fit refuses."""
        tokens = batch.prompt_tokens + batch.output_tokens
        blocks = -(-tokens // self.limits.kv_block_size[replicas])
        possible = blocks <= self.limits.kv_num_blocks[replicas]
        refused = self._queue.push(batch, replicas, possible, self.limits.max_waiting)
        self._tally.refused += refused

    def fail(self, replica: int) -> Batch:
        """A replica dies: its requests, to be resumed elsewhere from what they have emitted."""
        self.up[replica] = False
        slots = np.flatnonzero(self._live[replica])
        running = Batch(
            self._arrival_ms[replica, slots],
            self._context[replica, slots] + self._prefill[replica, slots],
            self._left[replica, slots],
            self._task[replica, slots],
            self._first_ms[replica, slots],
            self._emitted[replica, slots],
        )
        self._live[replica] = False
        self._tally.resumed += len(slots)
        return _merge(running, self._queue.drain(replica))

    def start(self, replica: int, now_ms: float) -> None:
        """A replica is ready."""
        self.up[replica] = True
        self.clock_ms[replica] = max(self.clock_ms[replica], now_ms)

    def advance(self, until_ms: float) -> Finished:
        """Every replica past `until_ms`; a step that has begun is finished."""
        self._finished = []
        behind = self.up & (self.clock_ms < until_ms)
        while behind.any():
            self._sweep(np.flatnonzero(behind), until_ms)
            behind = self.up & (self.clock_ms < until_ms)
        return Finished(np.concatenate(self._finished) if self._finished else np.zeros(0))

    def next_step_ms(self) -> float:
        """When the next step of any replica begins; infinite if nobody has anything to do."""
        replicas = np.flatnonzero(self.up)
        begins = np.where(
            self._live[replicas].any(axis=1),
            self.clock_ms[replicas],
            np.maximum(self._queue.next_ms(replicas), self.clock_ms[replicas]),
        )
        return float(begins.min(initial=NEVER))

    def has_work(self) -> bool:
        return bool(self._live.any() or self._queue.length.any())

    # -- a sweep -----------------------------------------------------------------------------------------

    def _sweep(self, replicas: IntArray, until_ms: float) -> None:
        self._make_room(replicas)
        self._admit(replicas)
        live = self._live[replicas, : self._used_slots()]
        busy = live.any(axis=1)
        idle = replicas[~busy]
        self.clock_ms[idle] = np.minimum(until_ms, np.maximum(self._queue.next_ms(idle), self.clock_ms[idle]))
        if self._steps_together and busy.any():
            self._meet(replicas[busy])
            busy &= self.clock_ms[replicas] < until_ms
        if busy.any():
            self._run(replicas[busy], live[busy], until_ms)

    def _meet(self, replicas: IntArray) -> None:
        """Those that begin a step wait for the group: nobody's clock is behind the latest member's."""
        members = np.flatnonzero(self.up & self._live.any(axis=1))
        self.clock_ms[replicas] = self.clock_ms[members].max()

    def _used_slots(self) -> int:
        """Slots up to the last one in use anywhere: free ones are taken from the front, and cost no time."""
        used = np.flatnonzero(self._live.any(axis=0))
        return int(used[-1]) + 1 if len(used) else 1

    def _run(self, replicas: IntArray, live: NDArray[np.bool_], until_ms: float) -> None:
        now_ms = self.clock_ms[replicas]
        place = (replicas, slice(live.shape[1]))
        prefill = np.where(live, self._prefill[place], 0)
        decoding = live & (prefill == 0)
        count = decoding.sum(axis=1)
        pending = prefill.sum(axis=1)
        rows_left = np.maximum(self.limits.max_step_rows[replicas] - count, 0)
        left = self._left[place]
        context = np.where(decoding, self._context[place], 0)
        steps = Steps(
            replicas=replicas,
            decoding=decoding,
            remaining=self._may_emit(place),
            prefill_rows=np.minimum(pending, rows_left),
            context_tokens=context.sum(axis=1) + count,
            num_steps=self._stride(replicas, pending, count, now_ms, until_ms),
            now_ms=now_ms,
        )
        emitted = self._law.verify(steps)
        tokens = np.where(decoding, np.minimum(emitted.tokens, left), 0)
        # Steps until a request's end, as if its tokens came evenly: what comes after costs nothing.
        share = np.minimum(1.0, left / np.maximum(emitted.tokens, 1))
        own_steps = np.where(decoding, np.ceil(share * steps.num_steps[:, None] - 1e-9), 0.0)
        # A stride ends with the last request that decodes in it.
        needed = np.where(count > 0, own_steps.max(axis=1), steps.num_steps)
        chunks = self._chunks(replicas, prefill, rows_left - emitted.verified.astype(np.int64))
        steps = replace(steps, num_steps=needed.astype(np.int64), prefill_rows=chunks.sum(axis=1))
        self._left[place] -= tokens
        self._context[place] += tokens + chunks
        self._prefill[place] -= chunks
        first = (prefill > 0) & (chunks == prefill)  # the prompt is complete: its step emits a token
        self._left[place] -= first
        tokens = tokens + first
        self._emitted[place] += tokens
        self.num_emitted[replicas] += tokens.sum(axis=1)
        remaining = self._left[place]
        ended = live & (remaining <= 0) & (decoding | first)
        still = (decoding | first) & ~ended
        alive = own_steps.sum(axis=1) / steps.num_steps
        following = Next(
            decoding=still,
            remaining=self._may_emit(place),
            prefill_rows=self._next_prefill(replicas, place, still, ended),
            context_tokens=np.where(still, self._context[place] + 1, 0).sum(axis=1),
        )
        step_ms = self._law.finish(steps, alive, following)
        if self._steps_together:
            step_ms = np.full_like(step_ms, step_ms.max())
        self.clock_ms[replicas] = now_ms + step_ms * steps.num_steps
        self._note(steps, emitted.verified, alive, tokens, first, step_ms)
        if first.any():
            self._first_tokens(replicas, first)
        if ended.any():
            self._end(replicas, ended, now_ms, step_ms, np.where(first, steps.num_steps[:, None], own_steps))

    def _may_emit(self, place: tuple[IntArray, slice]) -> IntArray:
        """Tokens that each request may still emit before it is cut. [n, S]"""
        most = self._max_tokens[np.minimum(self._task[place], len(self._max_tokens) - 1)]
        return np.asarray(most - self._emitted[place])

    def _next_prefill(
        self,
        replicas: IntArray,
        place: tuple[IntArray, slice],
        still: NDArray[np.bool_],
        ended: NDArray[np.bool_],
    ) -> IntArray:
        """Rows of prompts that the next step will take, as far as is known now: what is left of those that
        run, and those that have come meanwhile and can start. [n]"""
        if not self._law.exact:  # the look-up by load has no use for it
            return np.zeros(len(replicas), dtype=np.int64)
        live = self._live[place] & ~ended
        pending = np.where(live, self._prefill[place], 0).sum(axis=1)
        free = self.limits.max_running[replicas] - live.sum(axis=1)
        for row in np.flatnonzero((self._queue.length[replicas] > 0) & (free > 0)):
            replica = int(replicas[row])
            pending[row] += self._queue.arrived_rows(replica, int(free[row]), self.clock_ms[replica])
        rows_left = self.limits.max_step_rows[replicas] - still.sum(axis=1)
        return np.asarray(np.minimum(pending, np.maximum(rows_left, 0)))

    def _stride(
        self, replicas: IntArray, pending: IntArray, count: IntArray, now_ms: Floats, until_ms: float
    ) -> IntArray:
        """Steps that a replica may run at once. [n]"""
        if self._max_stride == 1:
            return np.ones(len(replicas), dtype=np.int64)
        full = self._live[replicas].sum(axis=1) >= self.limits.max_running[replicas]
        horizon = np.where(full, until_ms, np.minimum(until_ms, self._queue.next_ms(replicas)))
        step_ms = np.maximum(self._tally.recent_step_ms[replicas], 1e-3)
        fitting = np.ceil((horizon - now_ms) / step_ms)
        return np.where(pending > 0, 1, np.clip(fitting, 1, self._max_stride)).astype(np.int64)

    def _chunks(self, replicas: IntArray, prefill: IntArray, rows_left: IntArray) -> IntArray:
        """Rows of each prompt in this step, first come first served. [n, S]"""
        chunks = prefill.copy()
        for row in np.flatnonzero(prefill.sum(axis=1) > rows_left):
            chunks[row] = 0
            slots = np.flatnonzero(prefill[row])
            slots = slots[np.argsort(self._order[replicas[row], slots])]
            before = np.concatenate(([0], np.cumsum(prefill[row, slots])[:-1]))
            # One row at least, so that a step filled by drafts cannot hold a prompt up for ever.
            room = max(int(rows_left[row]), 1)
            chunks[row, slots] = np.clip(room - before, 0, prefill[row, slots])
        return chunks

    def _first_tokens(self, replicas: IntArray, first: NDArray[np.bool_]) -> None:
        rows, slots = np.nonzero(first)
        mine = replicas[rows]
        fresh = np.isnan(self._first_ms[mine, slots])
        mine, slots = mine[fresh], slots[fresh]
        self._first_ms[mine, slots] = self.clock_ms[mine]
        self._tally.first_tokens(self._arrival_ms[mine, slots], self.clock_ms[mine])

    def _end(
        self, replicas: IntArray, ended: NDArray[np.bool_], now_ms: Floats, step_ms: Floats, own_steps: Floats
    ) -> None:
        rows, slots = np.nonzero(ended)
        mine = replicas[rows]
        at_ms = now_ms[rows] + step_ms[rows] * own_steps[rows, slots]
        self._live[mine, slots] = False
        np.add.at(self.num_ended, mine, 1)
        self._tally.answers(
            arrival_ms=self._arrival_ms[mine, slots],
            first_ms=self._first_ms[mine, slots],
            ended_ms=at_ms,
            tokens=self._emitted[mine, slots],
            task=self._task[mine, slots],
        )
        self._finished.append(at_ms)

    def _note(
        self,
        steps: Steps,
        verified: Floats,
        alive: Floats,
        tokens: IntArray,
        first: NDArray[np.bool_],
        step_ms: Floats,
    ) -> None:
        self.last_verified[steps.replicas] = verified
        self._tally.steps(
            replicas=steps.replicas,
            ended_ms=self.clock_ms[steps.replicas],
            num_steps=steps.num_steps,
            step_ms=step_ms,
            verified=verified,
            decoding=alive,
            tokens=tokens.sum(axis=1),
            first_tokens=first.sum(axis=1),
        )

    # -- memory ------------------------------------------------------------------------------------------

    def _blocks(self, replicas: IntArray | slice) -> IntArray:
        """KV blocks of each slot in use: its prompt's from the start, and its anchor's. [n, used]"""
        place = (replicas, slice(self._used_slots()))
        tokens = np.where(self._live[place], self._context[place] + self._prefill[place] + 1, 0)
        return np.asarray(-(-tokens // self.limits.kv_block_size[replicas][:, None]), dtype=np.int64)

    def _make_room(self, replicas: IntArray) -> None:
        """Preempts the latest arrivals where anchors no longer fit."""
        blocks = self._blocks(replicas)
        over = blocks.sum(axis=1) > self.limits.kv_num_blocks[replicas]
        for row in np.flatnonzero(over):
            replica, mine = replicas[row], blocks[row]
            slots = np.flatnonzero(self._live[replica])
            for slot in slots[np.argsort(-self._order[replica, slots])]:
                if mine.sum() <= self.limits.kv_num_blocks[replica] or len(slots) == 1:
                    break
                mine[slot] = 0
                self._preempt(int(replica), int(slot))

    def _preempt(self, replica: int, slot: int) -> None:
        """Back to the head of the queue; what it has emitted is prefilled again."""
        self._live[replica, slot] = False
        self._queue.push_front(
            replica,
            arrival_ms=float(self._arrival_ms[replica, slot]),
            prompt_tokens=int(self._context[replica, slot] + self._prefill[replica, slot]),
            output_tokens=int(self._left[replica, slot]),
            task=int(self._task[replica, slot]),
            first_ms=float(self._first_ms[replica, slot]),
            emitted=int(self._emitted[replica, slot]),
        )
        self._tally.preemptions += 1

    def _admit(self, replicas: IntArray) -> None:
        """Starts the heads of the queues while slots, blocks and rows of a step are there."""
        candidates = replicas[self._queue.next_ms(replicas) <= self.clock_ms[replicas]]
        while len(candidates):
            place = (candidates, slice(self._used_slots()))
            live, prefill = self._live[place], self._prefill[place]
            pending = np.where(live, prefill, 0).sum(axis=1)
            running = live.sum(axis=1)
            decoding = running - (live & (prefill > 0)).sum(axis=1)
            head = self._queue.head_prompt(candidates)
            size = self.limits.kv_block_size[candidates]
            free = self.limits.kv_num_blocks[candidates] - self._blocks(candidates).sum(axis=1)
            fits = (
                (running < self.limits.max_running[candidates])
                & (decoding + pending < self.limits.max_step_rows[candidates])
                & (-(-(head + 1) // size) <= free)
            )
            candidates = candidates[fits]
            if not len(candidates):
                return
            self._start(candidates)
            candidates = candidates[self._queue.next_ms(candidates) <= self.clock_ms[candidates]]

    def _start(self, replicas: IntArray) -> None:
        """The first waiting request of each, into its first free slot."""
        slots = np.argmin(self._live[replicas], axis=1)
        item = self._queue.pop(replicas)
        assert item.first_ms is not None, "queues keep what a preempted request has had"
        assert item.emitted is not None
        place = (replicas, slots)
        self._live[place] = True
        self._arrival_ms[place] = item.arrival_ms
        self._first_ms[place] = item.first_ms
        self._prefill[place] = item.prompt_tokens
        self._context[place] = 0
        self._left[place] = item.output_tokens
        self._emitted[place] = item.emitted
        self._task[place] = item.task
        self._order[place] = self._started + np.arange(len(replicas))
        self._started += len(replicas)
        self._law.start(replicas, slots, item.task)


class _Queues:
    """A ring of waiting requests for each replica."""

    def __init__(self, count: int, places: int) -> None:
        self._places = places
        self._head = np.zeros(count, dtype=np.int64)
        self.length = np.zeros(count, dtype=np.int64)
        self._arrival_ms = np.zeros((count, places))
        self._first_ms = np.zeros((count, places))
        self._prompt = np.zeros((count, places), dtype=np.int64)
        self._output = np.zeros((count, places), dtype=np.int64)
        self._emitted = np.zeros((count, places), dtype=np.int64)
        self._task = np.zeros((count, places), dtype=np.int64)

    def push(self, batch: Batch, replicas: IntArray, possible: NDArray[np.bool_], most: IntArray) -> int:
        """Appends in order; → how many were refused."""
        order = np.argsort(replicas, kind="stable")
        order = order[possible[order]]
        mine = replicas[order]
        starts = np.concatenate(([True], mine[1:] != mine[:-1])) if len(mine) else np.zeros(0, dtype=bool)
        begin = np.maximum.accumulate(np.where(starts, np.arange(len(mine)), 0))
        rank = np.arange(len(mine)) - begin  # of each among those of its replica
        fits = self.length[mine] + rank < most[mine]
        order, mine, rank = order[fits], mine[fits], rank[fits]
        place = (mine, (self._head[mine] + self.length[mine] + rank) % self._places)
        self._arrival_ms[place] = batch.arrival_ms[order]
        self._first_ms[place] = np.nan if batch.first_ms is None else batch.first_ms[order]
        self._prompt[place] = batch.prompt_tokens[order]
        self._output[place] = batch.output_tokens[order]
        self._emitted[place] = 0 if batch.emitted is None else batch.emitted[order]
        self._task[place] = batch.task[order]
        self.length += np.bincount(mine, minlength=len(self.length))
        return len(batch) - len(mine)

    def push_front(
        self, replica: int, *, arrival_ms: float, prompt_tokens: int, output_tokens: int, task: int,
        first_ms: float, emitted: int,
    ) -> None:  # fmt: skip
        """One request that was preempted."""
        assert self.length[replica] < self._places, "the ring has a place for every running request"
        self._head[replica] = (self._head[replica] - 1) % self._places
        place = (replica, self._head[replica])
        self._arrival_ms[place], self._first_ms[place] = arrival_ms, first_ms
        self._prompt[place], self._output[place] = prompt_tokens, output_tokens
        self._emitted[place], self._task[place] = emitted, task
        self.length[replica] += 1

    def pop(self, replicas: IntArray) -> Batch:
        """The head of each; none may be empty."""
        item = self._at((replicas, self._head[replicas]))
        self._head[replicas] = (self._head[replicas] + 1) % self._places
        self.length[replicas] -= 1
        return item

    def next_ms(self, replicas: IntArray) -> Floats:
        """Arrival of each head; infinite where nothing waits. [n]"""
        arrival = self._arrival_ms[replicas, self._head[replicas]]
        return np.where(self.length[replicas] > 0, arrival, NEVER)

    def head_prompt(self, replicas: IntArray) -> IntArray:
        return np.asarray(self._prompt[replicas, self._head[replicas]])

    def arrived_rows(self, replica: int, most: int, now_ms: float) -> int:
        """Rows of the first `most` that had come by then."""
        places = (self._head[replica] + np.arange(min(most, self.length[replica]))) % self._places
        arrived = self._arrival_ms[replica, places] <= now_ms
        return int(self._prompt[replica, places[arrived]].sum())

    def drain(self, replica: int) -> Batch:
        """Empties one queue."""
        length = int(self.length[replica])
        places = (self._head[replica] + np.arange(length)) % self._places
        self.length[replica] = 0
        return self._at((np.full(length, replica), places))

    def _at(self, place: tuple[IntArray, IntArray]) -> Batch:
        return Batch(
            self._arrival_ms[place],
            self._prompt[place],
            self._output[place],
            self._task[place],
            self._first_ms[place],
            self._emitted[place],
        )


def _merge(first: Batch, second: Batch) -> Batch:
    """Two batches whose optional fields are set, by arrival."""
    order = np.argsort(np.concatenate((first.arrival_ms, second.arrival_ms)), kind="stable")
    pairs = ((getattr(first, f.name), getattr(second, f.name)) for f in fields(Batch))
    return Batch(*(np.concatenate(pair)[order] for pair in pairs))
