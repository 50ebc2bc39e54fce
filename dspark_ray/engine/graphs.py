"""Captured steps: the target's forward pass of small batches, recorded once for each of some sizes.

A recorded pass reads and writes the same memory each time it is replayed, so a batch is copied into buffers
that stay where they are, and filled up to the next captured size: a pad row belongs to no request (marker
−1), stores nothing (slot −1), and is a request of its own with one key, for kernels that do not look at
markers.
How the rows are shared out among requests lies in the buffers too: a graph knows the number of rows only.

What is captured, and how, is behind `Capturer`; tests replay on a CPU by calling the pass again.
"""

import bisect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from dspark_kernels.attention import PagedBatch
from torch import Tensor

from dspark_ray.core.config import AppConfig
from dspark_ray.core.types import VerificationMode
from dspark_ray.engine.batch import VerifyBatch
from dspark_ray.models.kv import KVStorage
from dspark_ray.models.targets.decoder import Decoder, DecoderOutput

MOST_ROWS = 512  # of a captured pass; above it a launch is small beside the work


class Captured(Protocol):
    """A recorded pass."""

    def replay(self) -> DecoderOutput:
        """Runs it on what the buffers hold now. The same tensors each time, overwritten."""


class Capturer(Protocol):
    """Records passes."""

    def capture(self, run: Callable[[], DecoderOutput]) -> Captured:
        """Calls `run` as often as it takes. All it reads must stay in place."""


class CudaCapturer:
    """CUDA graphs that share one pool of memory."""

    def __init__(self) -> None:
        self._pool: Any = None  # torch's handle

    def capture(self, run: Callable[[], DecoderOutput]) -> Captured:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()  # kernels are compiled and libraries set up outside the recording
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = run()
        self._pool = graph.pool()
        return _CudaCaptured(graph, output)


class _CudaCaptured:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: DecoderOutput) -> None:
        self._graph, self._output = graph, output

    def replay(self) -> DecoderOutput:
        self._graph.replay()
        return self._output


def capture_sizes(most_rows: int) -> tuple[int, ...]:
    """Rows of the captured passes: dense where a row more is noticed, an eighth apart above. Ascending; the
    last is min(most_rows, `MOST_ROWS`)."""
    limit = min(most_rows, MOST_ROWS)
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, MOST_ROWS + 1, 32)}
    return (*sorted(size for size in sizes if size < limit), limit)


class _Buffers:
    """The memory that captured passes read, for the largest of them; smaller ones use its beginning."""

    def __init__(self, most_rows: int, max_blocks: int, device: torch.device) -> None:
        def long() -> Tensor:
            return torch.zeros(most_rows, dtype=torch.int64, device=device)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.token_ids, self.positions, self.slots = long(), long(), long()
        self.query_start = ints(most_rows + 1)
        self.kv_len, self.row_request = ints(most_rows), ints(most_rows)
        self.block_tables = ints(most_rows, max_blocks)

    def fill(self, batch: VerifyBatch, size: int) -> None:
        """Copies a batch of at most `size` rows, and pads it to them. The batch lies on the host."""
        rows, paged = len(batch.token_ids), batch.paged
        requests, pad = len(paged.kv_len), size - rows
        assert pad >= 0
        # The pad rows are requests of one row and one key; those after them have none.
        starts = np.minimum(np.arange(1, size - requests + 1) + rows, size)
        lens = (np.arange(size - requests) < pad).astype(np.int32)
        _put(self.token_ids, batch.token_ids, pad, 0)
        _put(self.positions, batch.positions, pad, 0)
        _put(self.slots, batch.slots, pad, -1)
        markers = paged.markers(rows)
        _put(self.row_request, markers, pad, -1)
        self.query_start[: size + 1].copy_(_joined(paged.query_start, starts), non_blocking=True)
        self.kv_len[:size].copy_(_joined(paged.kv_len, lens), non_blocking=True)
        tables = paged.block_tables
        self.block_tables[:requests, : tables.shape[1]].copy_(tables, non_blocking=True)

    def paged(self, size: int, block_size: int, max_query: int, max_kv: int) -> PagedBatch:
        """The first `size` rows, in as many requests at most."""
        return PagedBatch(
            self.query_start[: size + 1],
            self.kv_len[:size],
            self.block_tables[:size],
            block_size,
            max_query,
            max_kv,
            self.row_request[:size],
        )


class GraphedTarget:
    """A target's passes from captured ones where a batch fits one, else as they are."""

    def __init__(self, config: AppConfig, target: Decoder, kv: KVStorage, capturer: Capturer) -> None:
        speculates = config.speculation.mode is not VerificationMode.OFF
        self._max_query = 1 + (config.speculation.num_draft_tokens if speculates else 0)
        most_rows = min(config.engine.max_running * self._max_query, config.engine.max_step_rows)
        self.sizes = capture_sizes(most_rows)
        self._target, self._kv, self._capturer = target, kv, capturer
        self._max_kv, self._block_size = config.model.max_model_len, config.engine.kv_block_size
        # An anchor's blocks hold its draft, too.
        max_blocks = -(-(self._max_kv + self._max_query) // self._block_size)
        self._buffers = _Buffers(self.sizes[-1], max_blocks, target.device)
        self._captured: dict[tuple[int, tuple[int, ...]], Captured] = {}

    @torch.inference_mode()
    def capture_all(self, taps: tuple[int, ...]) -> None:
        """All sizes, the largest first, whose memory the others then share. Other taps are captured when they
        come."""
        for size in reversed(self.sizes):
            self._get(size, taps)

    def takes(self, batch: VerifyBatch) -> bool:
        """Whether a captured pass does it: decoding requests alone, and not too many rows."""
        return (
            len(batch.token_ids) <= self.sizes[-1]
            and batch.paged.max_query <= self._max_query
            and all(item.decoding and item.sequence.request.adapter is None for item in batch.work)
        )

    def run(self, batch: VerifyBatch, taps: tuple[int, ...]) -> tuple[VerifyBatch, DecoderOutput]:
        """The pass of a batch that lies on the host → the batch on the device, and what the target said, for
        its own rows. Both are overwritten by the next call."""
        rows = len(batch.token_ids)
        size = self.sizes[bisect.bisect_left(self.sizes, rows)]
        captured = self._get(size, taps)
        buffers = self._buffers
        buffers.fill(batch, size)
        output = captured.replay()
        placed = replace(
            batch,
            token_ids=buffers.token_ids[:rows],
            positions=buffers.positions[:rows],
            slots=buffers.slots[:rows],
            logit_rows=batch.logit_rows.to(self._target.device),
        )
        return placed, replace(output, hidden=output.hidden[:rows], taps=output.taps[:rows])

    def _get(self, size: int, taps: tuple[int, ...]) -> Captured:
        key = (size, taps)
        if key not in self._captured:
            self._captured[key] = self._capture(size, taps)
        return self._captured[key]

    def _capture(self, size: int, taps: tuple[int, ...]) -> Captured:
        buffers = self._buffers
        # Rows of no request, so that the passes of the capture store nothing.
        buffers.row_request.fill_(-1)
        buffers.slots.fill_(-1)
        buffers.query_start.copy_(torch.arange(len(buffers.query_start)))
        buffers.kv_len.fill_(1)
        paged = buffers.paged(size, self._block_size, self._max_query, self._max_kv)

        def run() -> DecoderOutput:
            return self._target.forward(
                buffers.token_ids[:size],
                buffers.positions[:size],
                self._kv,
                buffers.slots[:size],
                paged,
                taps,
            )

        return self._capturer.capture(run)


def _put(buffer: Tensor, values: Tensor, pad: int, filler: int) -> None:
    rows = len(values)
    buffer[:rows].copy_(values, non_blocking=True)
    buffer[rows : rows + pad].fill_(filler)


def _joined(values: Tensor, more: np.ndarray) -> Tensor:
    return torch.cat([values, torch.from_numpy(more.astype(np.int32))])
