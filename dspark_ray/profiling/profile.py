"""Measures a step table: target steps by rows, by rows of prompts and by context, drafting by requests.

All sizes are measured in turn, several times over, and each gets the median of its rounds: a disturbance of
the machine then hits one round of many sizes, not all rounds of one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from dspark_ray.core.clock import Clock, SystemClock
from dspark_ray.engine.engine import Engine
from dspark_ray.profiling.step_timer import StepTimer, TargetStep
from dspark_ray.scheduling.step_table import StepTable

OnProgress = Callable[[float], None]

# Sizes up to so many rows are measured so often in each round. They are where budgets are searched: a token
# costs a hundredth of such a step, and so much must the medians be worth.
_SMALL_ROWS, _SMALL_SAMPLES = 64, 3
_MIN_SIZES = 4  # sizes of a target step that are measured however long they take


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """What is measured. Sizes beyond the engine's limits are left out."""

    # Matrix units take rows in tiles of 16: a step of 17 rows costs up to a tenth more than one of 16, and
    # the next 15 rows little. A line from 16 to 24 would make each of them dear.
    rows: tuple[int, ...] = (
        *(1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 33, 40, 48, 49, 56, 64, 65, 80, 81, 96, 97, 128, 129),
        *(192, 256, 384, 512, 1024, 2048),
    )
    prompt_rows: tuple[int, ...] = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    requests: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    context_tokens: int = 256  # of each request, and of a prompt at most
    long_context_tokens: int = 1024  # the second point of the fit of the context's cost
    rounds: int = 5
    max_s: float = 12.0  # no further round is begun after this; twice this, and the first one is cut short


def profile_engine(
    engine: Engine,
    *,
    settings: ProfileSettings | None = None,
    made_from: dict[str, Any] | None = None,
    on_progress: OnProgress | None = None,
    clock: Clock | None = None,
) -> StepTable:
    """The table of an idle engine, which is idle and unchanged afterwards; takes seconds.

    `on_progress` is told the finished share in [0, 1].
    """
    clock = clock or SystemClock()
    timer = StepTimer(engine, clock)
    try:
        return _Profile(timer, settings or ProfileSettings(), on_progress or (lambda share: None), clock).run(
            made_from or {}
        )
    finally:
        timer.close()


class _Profile:
    """One profiling run: the samples of every size, round by round."""

    def __init__(
        self, timer: StepTimer, settings: ProfileSettings, on_progress: OnProgress, clock: Clock
    ) -> None:
        self._timer, self._settings, self._on_progress, self._clock = timer, settings, on_progress, clock
        limits = timer.engine.config.engine
        self._captured = timer.engine.graphs.sizes if timer.engine.graphs else ()
        rows = _grid((*settings.rows, *_stairs(self._captured)), limits.max_step_rows)
        requests = _grid(settings.requests, limits.max_running) if timer.engine.drafter else []
        self._draft: list[_Point] = [
            _Point(count, partial(timer.draft_ms, count, settings.context_tokens)) for count in requests
        ]
        self._draft_one: list[_Point] = [
            _Point(count, partial(timer.draft_ms, count, settings.context_tokens, 1)) for count in requests
        ]
        most = 1 + timer.num_draft_tokens
        self._context = [self._step(*size) for size in self._context_pair(min(16, limits.max_running), 1)]
        self._context_rows = [
            self._step(*size) for size in self._context_pair(min(4, limits.max_running), most) if most > 1
        ]
        self._verify = [self._step(count, settings.context_tokens, None) for count in rows]
        self._prompts = [
            self._point(count, timer.prompt_step(count, settings.context_tokens))
            for count in _grid(settings.prompt_rows, limits.max_step_rows)
        ]

    def _context_pair(self, num_requests: int, rows_each: int) -> list[tuple[int, int, int]]:
        """The same rows over a short and a long context; no pair where contexts cannot differ."""
        num_rows = num_requests * rows_each
        long = min(self._settings.long_context_tokens, self._timer.max_context)
        short = min(self._settings.context_tokens // 4, long)
        return [(num_rows, context, num_requests) for context in (short, long)] if short < long else []

    def _step(self, num_rows: int, context: int, num_requests: int | None) -> "_Point":
        return self._point(num_rows, self._timer.target_step(num_rows, context, num_requests))

    def _point(self, num_rows: int, step: TargetStep) -> "_Point":
        decoding = [w.num_rows for w in step.work if w.decoding]
        more_rows = sum(decoding) / len(decoding) - 1.0 if decoding else 0.0
        return _Point(num_rows, partial(self._timer.verify_ms, step), step.context_tokens, more_rows)

    def run(self, made_from: dict[str, Any]) -> StepTable:
        for first in (self._verify[0], self._prompts[0], *self._draft[:1]):
            first.measure()  # first-use costs
        self._started_ms = self._clock.now_ms()
        for number in range(self._settings.rounds):
            if number > 0 and self._elapsed_s() > self._settings.max_s:
                break
            self._round()
            self._on_progress((number + 1) / self._settings.rounds)
        context_ms = self._context_ms(self._context)
        share = self._row_share(context_ms)
        verify = [point for point in self._verify if point.samples]
        prompts = [point for point in self._prompts if point.samples]
        return StepTable(
            rows=np.array([point.size for point in verify]),
            verify_ms=np.array([_without_context(point, context_ms, share) for point in verify]),
            requests=np.array([point.size for point in self._draft], dtype=np.int64),
            draft_ms=np.array([point.median_ms for point in self._draft]),
            draft_fixed_ms=np.array(
                [
                    self._fixed_ms(block.median_ms, one.median_ms)
                    for block, one in zip(self._draft, self._draft_one, strict=True)
                ]
            ),
            staircase_rows=max((p.size for p in verify if p.size in self._captured), default=0),
            prompt_rows=np.array([point.size for point in prompts], dtype=np.int64),
            prompt_ms=np.array([point.median_ms for point in prompts]),
            context_ms_per_token=context_ms,
            context_row_share=share,
            made_from=made_from,
        )

    def _round(self) -> None:
        """Each size once, small ones some times; the big ones last: on a machine too slow for them they are
        extrapolated."""
        steps = sorted([*self._verify, *self._prompts], key=lambda point: point.size)
        first = [*self._draft, *self._draft_one, *self._context, *self._context_rows]
        needed = len(first) + 2 * _MIN_SIZES
        small = [point for point in [*first, *steps] if point.size <= _SMALL_ROWS]
        for done, point in enumerate([*first, *steps, *(_SMALL_SAMPLES - 1) * small]):
            if done >= needed and self._elapsed_s() > 2 * self._settings.max_s:
                break
            point.samples.append(point.measure())

    def _elapsed_s(self) -> float:
        return (self._clock.now_ms() - self._started_ms) / 1e3

    def _fixed_ms(self, block_ms: float, one_ms: float) -> float:
        """What drafting would take for no token at all: the line through one token and a whole block."""
        share = 1.0 / self._timer.num_draft_tokens
        return max(0.0, (one_ms - share * block_ms) / (1.0 - share)) if share < 1.0 else 0.0

    def _row_share(self, context_ms: float) -> float:
        """How much of a cached token's cost each further row of a request adds, by steps of whole drafts."""
        if context_ms <= 0 or not self._context_rows:
            return 0.0
        more_rows = self._context_rows[0].more_rows
        share = (self._context_ms(self._context_rows) / context_ms - 1.0) / more_rows
        return min(max(share, 0.0), 1.0)

    def _context_ms(self, pair: "Sequence[_Point]") -> float:
        """Slope between the two points of a context pair, never negative. → ms a cached token"""
        if not pair:
            return 0.0
        short, long = pair
        slope = (long.median_ms - short.median_ms) / (long.context_tokens - short.context_tokens)
        return max(0.0, slope)


@dataclass(slots=True)
class _Point:
    """One size to be measured, and its samples."""

    size: int  # rows or requests
    measure: Callable[[], float]  # → ms
    context_tokens: int = 0
    more_rows: float = 0.0  # beside the first, of a decoding request
    samples: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        return float(np.median(self.samples))


def _without_context(point: _Point, context_ms: float, row_share: float) -> float:
    """The median less the context's share, which the table adds for the context it is asked for.

    Half of it at least stays: the context's cost was fitted on another size of step.
    """
    context_ms *= point.context_tokens * (1.0 + row_share * point.more_rows)
    return max(point.median_ms - context_ms, 0.5 * point.median_ms)


def _stairs(captured: Sequence[int]) -> tuple[int, ...]:
    """The sizes of captured steps, and the first one above them: it pays the uncaptured price."""
    return (*captured, captured[-1] + 1) if captured else ()


def _grid(sizes: Sequence[int], limit: int) -> list[int]:
    """The sizes up to `limit`, and `limit` itself."""
    return sorted({size for size in sizes if size < limit} | {limit})
