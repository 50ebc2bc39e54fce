"""From logits to the distribution that is sampled, and which drafted tokens stand, for a whole batch.

Ragged batches lie flat: request r has the rows `row_start[r] : row_start[r + 1]`, one for each of its ℓ draft
tokens and one after them; row i decides about draft token i. Rows behind the last request's belong to none.
"""

from torch import Tensor

from dspark_kernels.dispatch import ops_for


def filtered_probs(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """Temperature, then top-k, top-p and min-p, renormalised. [N, V] any float → [N, V] fp32.

    temperature [N, 1] > 0, top_k [N, 1] int64 (V: no filter), top_p and min_p [N, 1]; None where no row has
    one. Top-p keeps the smallest set of most likely tokens whose mass reaches p (never fewer than one, ties
    at its edge together); min-p keeps tokens of at least min_p × the largest. Logits may be −∞, not NaN.
    """
    return ops_for(logits).filtered_probs(logits, temperature, top_k, top_p, min_p)


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One draw a row: the first token up to which more than u of the row's weight lies, never one without
    weight. weights [N, V] ≥ 0, uniforms [N] fp64 in [0, 1) → [N] int64"""
    return ops_for(weights).inverse_cdf(weights, uniforms)


def leading_matches(chosen: Tensor, drafted: Tensor, row_start: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Greedy and shared-noise acceptance: a draft token stands iff the target chose it.

    chosen [M] int64; drafted [M] int64, anything in a request's last row; row_start [R + 1] int32; `most` ≥ ℓ
    of any request → (tokens that stand, the target's own after them), [R] int64 each.
    """
    return ops_for(chosen).leading_matches(chosen, drafted, row_start, most)


def accept(
    probs: Tensor,
    drafted: Tensor,
    row_start: Tensor,
    most: int,
    uniforms: Tensor,
    keys: Tensor,
    draft_probs: Tensor | None = None,
    one_hot: Tensor | None = None,
    vocab_map: Tensor | None = None,
    draft_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The rejection rule (Leviathan et al. 2023): left to right, x stands iff u · q(x) < p(x); the token
    after those is drawn from max(0, p − q) at the first rejection, from the last row's p if all stand.

    probs [M, V] fp32; drafted [M] int64 target ids, a valid id in a request's last row too; row_start and
    `most` as in `leading_matches`; uniforms [M] fp64 in [0, 1); keys [R] int64 of the draw (noise.py).
    draft_probs [M, Vd], None: one-hot; one_hot [R] bool: these requests' are, None: nobody's. With a reduced
    draft vocabulary, vocab_map [Vd] int64 gives target ids, and draft_ids [M] int64 the drafted tokens there.
    → (tokens that stand, the one after them), [R] int64 each.
    """
    return ops_for(probs).accept(
        probs, drafted, row_start, most, uniforms, keys, draft_probs, one_hot, vocab_map, draft_ids
    )


def survival_lengths(confidences: Tensor, budget: Tensor, max_lens: Tensor) -> Tensor:
    """The `budget` highest survivals of all requests together, as lengths; the earlier position of equals,
    then the lower row.

    confidences [R, γ] fp32, a NaN is 0, clipped to [0, 1]; survival is their running product. budget [1]
    int32 on the device; max_lens [R] int32 → lens [R] int32, Σ lens = min(budget, Σ min(max_lens, γ)).
    """
    return ops_for(confidences).survival_lengths(confidences, budget, max_lens)
