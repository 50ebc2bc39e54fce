"""Draws with noise that belongs to a place and a token: two distributions can be drawn from alike."""

from torch import Tensor

from dspark_kernels.dispatch import ops_for


def noisy_argmax(probs: Tensor, keys: Tensor, ids: Tensor | None) -> Tensor:
    """Index of the largest log p + G in each row: a draw from p (the Gumbel-max trick).

    probs [N, V] fp32, any positive scale, 0 excludes; keys [N] int64, one a row; ids [V] int64 are what the
    columns' noise belongs to, None: their indices. G depends on key and id alone: the same on every
    machine, for every batch and for every part of a vocabulary. → [N] int64, the first of equals
    """
    return ops_for(probs).noisy_argmax(probs, keys, ids)
