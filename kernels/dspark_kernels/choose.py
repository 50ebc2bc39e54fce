"""Greedy choices: the likeliest token of each row, and a drafter's sequential chain of them."""

from torch import Tensor

from dspark_kernels.dispatch import ops_for


def argmax(x: Tensor) -> Tensor:
    """Index of each row's largest value, the first of equals. [N, V] → [N] int64"""
    return ops_for(x).argmax(x)


def markov_chain(
    base: Tensor, w1: Tensor, w2: Tensor, anchors: Tensor, vocab_map: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x_k = argmax(base_k + W1[x_{k−1}] W2) from left to right (DSpark paper, Markov head), added in fp32.

    base [R, γ, Vd]; w1 [V, r]; w2 [r, Vd]; anchors [R] int64 are x_0; vocab_map [Vd] int64 gives the target
    id of each draft id, None: the same. → target ids x_1 … x_γ and what preceded each, both [R, γ] int64.
    """
    return ops_for(base).markov_chain(base, w1, w2, anchors, vocab_map)


def markov_logits(base: Tensor, w1: Tensor, w2: Tensor, previous: Tensor) -> Tensor:
    """One slot's base + W1[previous] W2, in fp32. base [R, Vd], previous [R] int64 → [R, Vd]"""
    return ops_for(base).markov_logits(base, w1, w2, previous)
