"""From confidences to survival, and from a budget to lengths.

A confidence c_k is the chance that draft token k is accepted given that all before it were. Survival
a_k = Π_{i≤k} c_i is what a verified token is worth: the chance that it is emitted. It never rises along
a block, so taking the highest survivals always takes prefixes. Counts are returned, not masks: a tie
cannot leave a hole in a block.
"""

import numpy as np
from numpy.typing import NDArray

from dspark_ray.core.types import IntArray

Floats = NDArray[np.floating]


def survival(confidences: Floats) -> NDArray[np.float64]:
    """a_k = Π_{i≤k} c_i. [R, γ] → [R, γ]; a NaN confidence is 0, values are clipped to [0, 1]."""
    bounded = _bounded(np.asarray(confidences, dtype=np.float64))
    return np.asarray(np.cumprod(bounded, axis=1), dtype=np.float64)


def clean_survival(scores: Floats) -> NDArray[np.float64]:
    """Scores made safe to rank: NaN is 0, in [0, 1], non-increasing along γ. [R, γ] → [R, γ]

    A position's value depends on the positions up to it only, so cleaning keeps admission non-anticipating.
    """
    return np.minimum.accumulate(_bounded(np.asarray(scores, dtype=np.float64)), axis=1)


def rank_tokens(
    scores: Floats, max_lens: IntArray, worth: Floats | None = None
) -> tuple[NDArray[np.float64], IntArray]:
    """All draft tokens that may be verified, best first.

    scores [R, γ], max_lens [R] (values above γ mean γ) → (survival [N], row [N]) with N = Σ min(max_lens, γ).
    worth [R, γ]: what an emitted token counts, non-increasing along γ; the values are then survival × worth.
    Ties favour the earlier position, then the lower row.
    """
    clean = clean_survival(scores)
    if worth is not None:
        clean = clean * worth
    num_rows, block = clean.shape
    if num_rows == 1:  # in order as it is
        values = clean[0, : max_lens[0]]
        return values, np.zeros(len(values), dtype=np.int64)
    # Position-major order, so that a stable sort breaks ties as promised.
    allowed = (np.arange(block)[:, None] < np.asarray(max_lens)[None, :]).ravel()
    values = clean.T.ravel()[allowed]
    rows = np.tile(np.arange(num_rows, dtype=np.int64), block)[allowed]
    order = np.argsort(-values, kind="stable")
    return values[order], rows[order].astype(np.int64)


def admit_top(scores: Floats, budget: int, max_lens: IntArray, worth: Floats | None = None) -> IntArray:
    """The `budget` highest survivals of all requests together, as lengths. → lens [R] int64

    scores [R, γ]; max_lens [R] most tokens per request. Σ lens = min(budget, Σ max_lens), tokens of zero
    survival included once nothing better is left. Whether position k of a request is admitted depends on
    its own scores up to k and on other requests, never on its own later scores. worth [R, γ]: as in
    `rank_tokens`; known before the blocks are drawn.
    """
    _, rows = rank_tokens(scores, max_lens, worth)
    return np.bincount(rows[: max(budget, 0)], minlength=len(scores)).astype(np.int64)


def admitted_survival(scores: Floats, lens: IntArray) -> float:
    """Σ_r Σ_{j≤lens_r} a_{r,j}: the draft tokens expected to be accepted. scores [R, γ], lens [R]"""
    clean = clean_survival(scores)
    inside = np.arange(clean.shape[1])[None, :] < np.asarray(lens)[:, None]
    return float(clean[inside].sum())


def _bounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """In [0, 1], a NaN as 0: `fmax` takes the other operand of a NaN."""
    return np.asarray(np.minimum(np.fmax(values, 0.0), 1.0), dtype=np.float64)
