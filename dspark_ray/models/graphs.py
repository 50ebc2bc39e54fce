"""Captured passes: a forward pass over few rows, recorded once for each of some sizes.

A recorded pass reads and writes the same memory each time it is replayed, so its rows are copied into buffers
that stay where they are, and filled up to the next captured size: a pad row belongs to no request (marker
−1), stores nothing (slot −1), and is a request of its own with one key, for kernels that do not look at
markers. How the rows are shared out among requests lies in the buffers too: a graph knows the number of rows
only.

The target's pass (engine/graphs.py) and the drafter's (drafters/dspark.py) are run so. What is captured, and
how, is behind `Capturer`; tests replay on a CPU by calling the pass again.
"""

import bisect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from dspark_kernels.attention import PagedBatch
from torch import Tensor

from dspark_ray.models.transfer import to_device

MOST_ROWS = 512  # of a captured pass; above it a launch is small beside the work
Output = TypeVar("Output")
Result = TypeVar("Result", covariant=True)
Variant = TypeVar("Variant", bound=Hashable)


class Captured(Protocol[Result]):
    """A recorded pass."""

    def replay(self) -> Result:
        """Runs it on what the buffers hold now. The same tensors each time, overwritten."""


class Capturer(Protocol):
    """Records passes."""

    def capture(self, run: Callable[[], Output]) -> Captured[Output]:
        """Calls `run` as often as it takes. All it reads must stay in place."""


class CudaCapturer:
    """CUDA graphs that share one pool of memory."""

    def __init__(self) -> None:
        self._pool: Any = None  # torch's handle

    def capture(self, run: Callable[[], Output]) -> Captured[Output]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()  # kernels are compiled and libraries set up outside the recording
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Another thread may load a drafter's weights meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = run()
        self._pool = graph.pool()
        return _CudaCaptured(graph, output)


class _CudaCaptured(Generic[Output]):
    def __init__(self, graph: torch.cuda.CUDAGraph, output: Output) -> None:
        self._graph, self._output = graph, output

    def replay(self) -> Output:
        self._graph.replay()
        return self._output


def capture_sizes(most_rows: int) -> tuple[int, ...]:
    """Rows of the captured passes: dense where a row more is noticed, an eighth apart above. Ascending; the
    last is min(most_rows, `MOST_ROWS`)."""
    limit = min(most_rows, MOST_ROWS)
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, MOST_ROWS + 1, 32)}
    return (*sorted(size for size in sizes if size < limit), limit)


@dataclass(frozen=True, slots=True)
class FlatRows:
    """What a pass is given, on the host or in the buffers of a captured one."""

    token_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64
    slots: Tensor | None  # [N] int64, where their keys go, −1: nowhere; None: nothing is stored
    paged: PagedBatch

    def to(self, device: torch.device) -> "FlatRows":
        """There; as it is for the CPU."""
        if device.type == "cpu":
            return self
        return FlatRows(
            to_device(self.token_ids, device),
            to_device(self.positions, device),
            None if self.slots is None else to_device(self.slots, device),
            self.paged.to(device),
        )


@dataclass(frozen=True, slots=True)
class PassLimits:
    """The largest pass that is captured, and what its attention must be made for."""

    most_rows: int
    max_query: int  # rows of a request
    max_kv: int  # keys of a request
    block_size: int


class _Buffers:
    """The memory that captured passes read, for the largest of them; smaller ones use its beginning."""

    def __init__(self, most_rows: int, limits: PassLimits, device: torch.device) -> None:
        def long() -> Tensor:
            return torch.zeros(most_rows, dtype=torch.int64, device=device)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._limits = limits
        self.token_ids, self.positions, self.slots = long(), long(), long()
        self.query_start = ints(most_rows + 1)
        self.kv_len, self.row_request = ints(most_rows), ints(most_rows)
        # An anchor's blocks hold its draft, too.
        max_blocks = -(-(limits.max_kv + limits.max_query) // limits.block_size)
        self.block_tables = ints(most_rows, max_blocks)

    def forget(self) -> None:
        """Rows of no request, so that the passes of a capture store nothing."""
        self.row_request.fill_(-1)
        self.slots.fill_(-1)
        self.query_start.copy_(torch.arange(len(self.query_start)))
        self.kv_len.fill_(1)

    def fill(self, given: FlatRows, size: int) -> None:
        """Copies rows, `size` at most, and pads them to so many."""
        rows, paged = len(given.token_ids), given.paged
        requests, pad = len(paged.kv_len), size - rows
        assert pad >= 0
        # The pad rows are requests of one row and one key; those after them have none.
        starts = np.minimum(np.arange(1, size - requests + 1) + rows, size)
        lens = (np.arange(size - requests) < pad).astype(np.int32)
        _put(self.token_ids, given.token_ids, pad, 0)
        _put(self.positions, given.positions, pad, 0)
        if given.slots is not None:
            _put(self.slots, given.slots, pad, -1)
        _put(self.row_request, paged.markers(rows), pad, -1)
        self.query_start[: size + 1].copy_(_joined(paged.query_start, starts), non_blocking=True)
        self.kv_len[:size].copy_(_joined(paged.kv_len, lens), non_blocking=True)
        tables = paged.block_tables
        self.block_tables[:requests, : tables.shape[1]].copy_(tables, non_blocking=True)

    def rows(self, size: int) -> FlatRows:
        """The first `size`, in as many requests at most."""
        limits = self._limits
        return FlatRows(
            self.token_ids[:size],
            self.positions[:size],
            self.slots[:size],
            PagedBatch(
                self.query_start[: size + 1],
                self.kv_len[:size],
                self.block_tables[:size],
                limits.block_size,
                limits.max_query,
                limits.max_kv,
                self.row_request[:size],
            ),
        )


class GraphRunner(Generic[Variant, Output]):
    """Runs a pass from captured ones, of the smallest size that holds its rows."""

    def __init__(
        self,
        forward: Callable[[FlatRows, Variant], Output],
        limits: PassLimits,
        device: torch.device,
        capturer: Capturer,
    ) -> None:
        """`forward(rows, variant)` is the pass: rows on the device, and what else it depends on, a graph for
        each."""
        self.sizes = capture_sizes(limits.most_rows)
        self._forward, self._limits, self._capturer = forward, limits, capturer
        self._buffers = _Buffers(self.sizes[-1], limits, device)
        self._captured: dict[tuple[int, Variant], Captured[Output]] = {}

    @torch.inference_mode()
    def capture_all(self, variant: Variant) -> None:
        """All sizes, the largest first, whose memory the others then share. What else comes is captured when
        it does."""
        for size in reversed(self.sizes):
            self._get(size, variant)

    def takes(self, num_rows: int, max_query: int) -> bool:
        """Whether a captured pass holds so many rows, and so many of one request."""
        return num_rows <= self.sizes[-1] and max_query <= self._limits.max_query

    def size_for(self, num_rows: int) -> int:
        """Of the smallest captured pass that holds them."""
        return self.sizes[bisect.bisect_left(self.sizes, num_rows)]

    def run(self, given: FlatRows, variant: Variant) -> tuple[FlatRows, Output]:
        """Rows of the host or the device → themselves on the device, pad rows behind them, and what the pass
        gave for all of these. Both are overwritten by the next call."""
        size = self.size_for(len(given.token_ids))
        captured = self._get(size, variant)
        self._buffers.fill(given, size)
        return self._buffers.rows(size), captured.replay()

    def _get(self, size: int, variant: Variant) -> Captured[Output]:
        key = (size, variant)
        if key not in self._captured:
            self._buffers.forget()
            rows = self._buffers.rows(size)
            self._captured[key] = self._capturer.capture(lambda: self._forward(rows, variant))
        return self._captured[key]


def _put(buffer: Tensor, values: Tensor, pad: int, filler: int) -> None:
    rows = len(values)
    buffer[:rows].copy_(values, non_blocking=True)
    buffer[rows : rows + pad].fill_(filler)


def _joined(values: Tensor, more: np.ndarray) -> Tensor:
    if not len(more):
        return values
    return torch.cat([values, to_device(torch.from_numpy(more.astype(np.int32)), values.device)])
