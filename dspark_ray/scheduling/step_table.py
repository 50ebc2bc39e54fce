"""What a step costs on this machine: milliseconds by rows, and the drafter's by requests.

A `StepTable` is measured once per digest by the profiler. Up to the largest captured graph size a step
is padded to the next captured size, so its cost is a staircase; above it the cost is interpolated, and
never across that border: the first size above it already pays the uncaptured price.

Rows of prompts are cheaper than rows that decode: no token is decided in them (no LM head), and they share
the keys they attend to. A step of D decoding rows beside P prompt rows takes

    verify(D) + prompt(D + P) − prompt(D),

with prompt(n) the time of a step of n prompt rows alone: what P more rows add to the layers, and nothing to
the rest.

Attention costs by the cached keys that requests attend to. How much of that each further row of a request
costs again differs: nothing where it is the reading of the keys that takes the time, nearly all where it is
the arithmetic. With K keys and D rows of R requests it is κ · K · (1 + ρ · (D / R − 1)), so that a draft
token costs more the longer the contexts are; `rows` and `verify_ms` are without it.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_ray.core.artefact import check_format, check_made_from, load_json, save_json
from dspark_ray.core.digest import digest_json
from dspark_ray.core.errors import ArtefactError
from dspark_ray.core.types import IntArray
from dspark_ray.scheduling.correction import OnlineCorrection

FORMAT = "dspark-step-table/1"
FLAT_TOLERANCE = 0.05  # a table whose dearest step costs at most this share more than one row is flat

Float64Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class StepTable:
    """Measured step times. Raises `ArtefactError` for sizes or times that no machine can produce.

    All curves are made non-decreasing at construction: a bigger step that measured faster is noise, and
    a search over the raw figures would chase it.
    """

    rows: IntArray  # [n] rows of a target step (anchors + drafts), ascending
    verify_ms: Float64Array  # [n] target step time
    staircase_rows: int = 0  # largest captured graph size, one of `rows`; 0: interpolated everywhere
    requests: IntArray = field(
        default_factory=lambda: np.zeros(0, np.int64)
    )  # [m] drafting requests, ascending
    draft_ms: Float64Array = field(default_factory=lambda: np.zeros(0))  # [m] time to draft their blocks
    # [m] the part of it that does not shrink with the block; empty: shorter blocks count as fewer requests
    draft_fixed_ms: Float64Array = field(default_factory=lambda: np.zeros(0))
    # [p] rows of a step of prompts alone, ascending; empty: a prompt's row counts as one that decodes
    prompt_rows: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    prompt_ms: Float64Array = field(default_factory=lambda: np.zeros(0))  # [p] time of that step
    context_ms_per_token: float = 0.0  # κ: cost of a cached token that a request attends to
    context_row_share: float = 0.0  # ρ in [0, 1]: of κ that each further row of the request costs
    made_from: dict[str, Any] = field(default_factory=dict)  # digests, hardware, dtype, threads, ...
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        rows, verify_ms = _checked_curve("rows", self.rows, "verify_ms", self.verify_ms)
        requests, draft_ms = _checked_curve("requests", self.requests, "draft_ms", self.draft_ms)
        prompt_rows, prompt_ms = _checked_curve("prompt_rows", self.prompt_rows, "prompt_ms", self.prompt_ms)
        draft_fixed_ms = np.zeros(0)
        if len(self.draft_fixed_ms):
            _, draft_fixed_ms = _checked_curve(
                "requests", self.requests, "draft_fixed_ms", self.draft_fixed_ms
            )
            draft_fixed_ms = np.minimum(draft_fixed_ms, draft_ms)
        if not len(rows) or verify_ms[0] <= 0:
            raise ArtefactError("step table: it needs at least one row count, and times above 0")
        if self.staircase_rows != 0 and self.staircase_rows not in rows:
            raise ArtefactError(f"step table: staircase_rows={self.staircase_rows} is not one of its rows")
        if not (np.isfinite(self.context_ms_per_token) and self.context_ms_per_token >= 0):
            raise ArtefactError(f"step table: context_ms_per_token={self.context_ms_per_token} is not a cost")
        if not 0 <= self.context_row_share <= 1:
            raise ArtefactError(f"step table: context_row_share={self.context_row_share} is not in [0, 1]")
        for name, value in (
            ("rows", rows), ("verify_ms", verify_ms), ("requests", requests), ("draft_ms", draft_ms),
            ("draft_fixed_ms", draft_fixed_ms), ("prompt_rows", prompt_rows), ("prompt_ms", prompt_ms),
        ):  # fmt: skip
            object.__setattr__(self, name, value)
        object.__setattr__(self, "digest", digest_json(self._content()))

    @overload
    def verify_cost_ms(
        self, rows: int, context_tokens: float = 0, num_requests: float | None = None
    ) -> float: ...
    @overload
    def verify_cost_ms(
        self, rows: IntArray, context_tokens: float = 0, num_requests: float | None = None
    ) -> Float64Array: ...
    def verify_cost_ms(
        self, rows: int | IntArray, context_tokens: float = 0, num_requests: float | None = None
    ) -> float | Float64Array:
        """Predicted time of a target step of `rows` decoding rows that attends to `context_tokens` cached
        tokens; of so many requests, or as many as rows."""
        wanted = np.atleast_1d(np.asarray(rows, dtype=np.float64))
        above = self.rows > self.staircase_rows
        if above.any():
            cost = _interpolate(
                wanted, self.rows[above], self.verify_ms[above], _last_slope(self.rows, self.verify_ms)
            )
        else:
            cost = _interpolate(wanted, self.rows, self.verify_ms, _last_slope(self.rows, self.verify_ms))
        if self.staircase_rows:
            step = np.minimum(np.searchsorted(self.rows, wanted), len(self.rows) - 1)
            cost = np.where(wanted <= self.staircase_rows, self.verify_ms[step], cost)
        if context_tokens:
            more_rows = 0.0 if num_requests is None else wanted / num_requests - 1.0
            cost = cost + self.context_cost_ms(context_tokens, more_rows)
        return cost if isinstance(rows, np.ndarray) else float(cost[0])

    @overload
    def context_cost_ms(self, context_tokens: float, more_rows: float) -> float: ...
    @overload
    def context_cost_ms(self, context_tokens: float, more_rows: Float64Array) -> Float64Array: ...
    def context_cost_ms(self, context_tokens: float, more_rows: float | Float64Array) -> float | Float64Array:
        """What attending to so many cached tokens adds; more_rows: of each request, beside its first."""
        return self.context_ms_per_token * context_tokens * (1.0 + self.context_row_share * more_rows)

    @overload
    def prompt_cost_ms(self, rows: int) -> float: ...
    @overload
    def prompt_cost_ms(self, rows: IntArray) -> Float64Array: ...
    def prompt_cost_ms(self, rows: int | IntArray) -> float | Float64Array:
        """Predicted time of a target step of `rows` rows of prompts and nothing else; without that curve,
        what as many decoding rows cost."""
        if not len(self.prompt_rows):
            return self.verify_cost_ms(rows)
        wanted = np.atleast_1d(np.asarray(rows, dtype=np.float64))
        slope = _last_slope(self.prompt_rows, self.prompt_ms)
        cost = _interpolate(wanted, self.prompt_rows, self.prompt_ms, slope)
        return cost if isinstance(rows, np.ndarray) else float(cost[0])

    def step_cost_ms(
        self,
        decode_rows: int,
        prompt_rows: int,
        context_tokens: float = 0,
        num_requests: float | None = None,
    ) -> float:
        """Predicted time of a target step with both kinds of rows, at least one in all."""
        if decode_rows <= 0:
            return self.prompt_cost_ms(max(prompt_rows, 1))
        decode_ms = self.verify_cost_ms(decode_rows, context_tokens, num_requests)
        return decode_ms + self.added_prompt_ms(decode_rows, prompt_rows)

    def added_prompt_ms(self, decode_rows: int, prompt_rows: int) -> float:
        """What prompt rows add to a step of `decode_rows` decoding ones."""
        if prompt_rows <= 0:
            return 0.0
        if decode_rows <= 0:
            return self.prompt_cost_ms(prompt_rows)
        return self.prompt_cost_ms(decode_rows + prompt_rows) - self.prompt_cost_ms(decode_rows)

    def prompt_row_ms(self, max_step_rows: int) -> float:
        """What one row of a prompt adds to a step, on average up to `max_step_rows`."""
        if max_step_rows < 2:
            return 0.0
        return self.added_prompt_ms(1, max_step_rows - 1) / (max_step_rows - 1)

    def draft_cost_ms(self, num_requests: float, share: float = 1.0) -> float:
        """Predicted time to draft this share of a block for each of `num_requests`; 0 for none, and for a
        table without a drafter."""
        if num_requests <= 0 or not len(self.requests):
            return 0.0
        if not len(self.draft_fixed_ms):
            return self._drafting(self.draft_ms, num_requests * share)
        fixed = self._drafting(self.draft_fixed_ms, num_requests)
        return fixed + share * (self._drafting(self.draft_ms, num_requests) - fixed)

    def _drafting(self, ms: Float64Array, num_requests: float) -> float:
        wanted = np.asarray([num_requests], dtype=np.float64)
        return float(_interpolate(wanted, self.requests, ms, _last_slope(self.requests, ms))[0])

    def is_flat(self) -> bool:
        """No step costs noticeably more than one row: trimming cannot pay, or the profile is wrong."""
        return bool(self.verify_ms[-1] <= self.verify_ms[0] * (1 + FLAT_TOLERANCE))

    def summary(self) -> str:
        """One line for start-up."""
        points = sorted({0, len(self.rows) // 2, len(self.rows) - 1})
        verify = ", ".join(f"{self.rows[i]}: {self.verify_ms[i]:.1f}" for i in points)
        draft = f"; draft {self.requests[0]}: {self.draft_ms[0]:.1f} ms" if len(self.requests) else ""
        stairs = f", staircase to {self.staircase_rows}" if self.staircase_rows else ""
        flat = " — FLAT: every draft token will be verified" if self.is_flat() else ""
        return f"step table {self.digest}: verify ms by rows {{{verify}}}{stairs}{draft}{flat}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for disk and for `SurvivalReport.table`."""
        return {"format": FORMAT, **self._content()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "StepTable":
        """The reverse of `to_dict`; raises `ArtefactError` for anything else."""
        return cls._build(check_format(data, "step table", FORMAT), "step table")

    def save(self, path: Path) -> None:
        """As JSON, whole or not at all."""
        save_json(path, self.to_dict())

    @classmethod
    def load(cls, path: Path, expect: dict[str, Any] | None = None) -> "StepTable":
        """The table on disk; raises `ArtefactError` if damaged or if `expect` differs from `made_from`."""
        table = cls._build(load_json(path, "step table", FORMAT), f"step table {path}")
        check_made_from(f"step table {path}", table.made_from, expect, "profile again")
        return table

    @classmethod
    def _build(cls, fields: dict[str, Any], what: str) -> "StepTable":
        try:
            return cls(**fields)
        except TypeError as error:
            raise ArtefactError(f"{what}: {error}") from error

    def _content(self) -> dict[str, Any]:
        return {
            "rows": self.rows.tolist(),
            "verify_ms": self.verify_ms.tolist(),
            "staircase_rows": int(self.staircase_rows),
            "requests": self.requests.tolist(),
            "draft_ms": self.draft_ms.tolist(),
            "draft_fixed_ms": self.draft_fixed_ms.tolist(),
            "prompt_rows": self.prompt_rows.tolist(),
            "prompt_ms": self.prompt_ms.tolist(),
            "context_ms_per_token": float(self.context_ms_per_token),
            "context_row_share": float(self.context_row_share),
            "made_from": dict(self.made_from),
        }


def cost_curve(
    table: StepTable,
    correction: OnlineCorrection | None,
    *,
    base_rows: int,
    max_draft_tokens: int,
    num_drafting: float,
    context_tokens: float = 0.0,
) -> Float64Array:
    """Predicted time of a step with B = 0..max_draft_tokens draft tokens, drafting included. → [B + 1] ms

    What `LengthView.cost_ms` asks for. Drafting is not billed by B: a block drafter's time does not
    depend on how much of its block is verified. Non-decreasing, the correction included.
    """
    rows = base_rows + np.arange(max_draft_tokens + 1, dtype=np.int64)
    verify_ms = table.verify_cost_ms(rows, context_tokens, base_rows)
    if correction is not None:
        verify_ms = verify_ms * correction.factor(rows)
    return np.maximum.accumulate(verify_ms) + table.draft_cost_ms(num_drafting)


def _checked_curve(
    size_name: str, sizes: ArrayLike, ms_name: str, ms: ArrayLike
) -> tuple[IntArray, Float64Array]:
    """Both arrays validated, the times made non-decreasing, both read-only."""
    try:
        raw_sizes, raw_ms = np.array(sizes, dtype=np.float64), np.array(ms, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ArtefactError(f"step table: {size_name} and {ms_name} must be lists of numbers") from error
    if raw_sizes.ndim != 1 or raw_sizes.shape != raw_ms.shape:
        raise ArtefactError(f"step table: {size_name} and {ms_name} must be lists of one length")
    if not (
        np.isfinite(raw_sizes).all() and (raw_sizes == np.floor(raw_sizes)).all() and (raw_sizes >= 1).all()
    ):
        raise ArtefactError(f"step table: {size_name} must be whole numbers from 1")
    if (np.diff(raw_sizes) <= 0).any():
        raise ArtefactError(f"step table: {size_name} must be ascending")
    if not (np.isfinite(raw_ms).all() and (raw_ms >= 0).all()):
        raise ArtefactError(f"step table: {ms_name} must be times in milliseconds, finite and not negative")
    checked_sizes, checked_ms = raw_sizes.astype(np.int64), np.maximum.accumulate(raw_ms)
    checked_sizes.flags.writeable = checked_ms.flags.writeable = False
    return checked_sizes, checked_ms


def _last_slope(sizes: IntArray, ms: Float64Array) -> float:
    """Milliseconds per unit at the end of the grid; 0 for a single point."""
    return float((ms[-1] - ms[-2]) / (sizes[-1] - sizes[-2])) if len(sizes) > 1 else 0.0


def _interpolate(wanted: Float64Array, sizes: IntArray, ms: Float64Array, slope: float) -> Float64Array:
    """Linear inside the grid, the first value below it, the last slope beyond it."""
    beyond = np.maximum(wanted - sizes[-1], 0.0)
    return np.asarray(np.interp(wanted, sizes, ms) + slope * beyond, dtype=np.float64)
