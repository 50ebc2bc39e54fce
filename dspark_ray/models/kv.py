"""Storage of paged keys and values. Which block belongs to whom is the engine's business.

In float8 (e4m3), half the bytes of bf16, a key is stored as key / scale, with one scale for all keys of a
layer, and a value in the same way: the decoder's layers have the scales.
"""

import torch
from dspark_kernels import huge_pages
from torch import Tensor

CPU = torch.device("cpu")
FLOAT8 = torch.float8_e4m3fn


class KVStorage:
    """Keys and values of every layer, addressed by slot = block × block_size + offset."""

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
    ) -> None:
        shape = (num_layers, num_slots, num_kv_heads, head_dim)
        # Zeroed: a masked-out slot still takes part in arithmetic, and 0 × NaN is NaN.
        self.k = _zeros(shape, dtype, device)  # [L, S, KV, D]
        self.v = _zeros(shape, dtype, device)  # [L, S, KV, D]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(keys, values) of one layer, each [S, KV, D], writable."""
        return self.k[index], self.v[index]

    @property
    def num_bytes(self) -> int:
        return 2 * self.k.numel() * self.k.element_size()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype == FLOAT8:  # whose zero is a byte of zeros
        return _empty(shape, torch.uint8, device).zero_().view(FLOAT8)
    return _empty(shape, dtype, device).zero_()


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return huge_pages.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)
